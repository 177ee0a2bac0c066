"""``@package-indexes``: what pip, npm and apt are configured with, in trees made here; tokens never come along."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sloplet.network import configured
from sloplet.network.configured import Machine
from sloplet.network.indexes import Indexes, package_indexes
from sloplet.network.policy import Policy

pytestmark = pytest.mark.anyone

DEFAULT = {"https://pypi.org", "https://files.pythonhosted.org", "https://registry.npmjs.org"}
PIP_DEFAULT = {"https://pypi.org", "https://files.pythonhosted.org"}
NPM_DEFAULT = {"https://registry.npmjs.org"}
TOKEN = "canary-token-51f0"


class World:
    """A tree of configuration files."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.env: dict[str, str] = {}

    def put(self, path: str, text: str) -> None:
        file = self.root / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    @property
    def machine(self) -> Machine:
        return Machine(self.root, self.root / "home/me", self.env, (self.root / "usr",), None)

    def found(self) -> Indexes:
        return package_indexes(self.machine)

    def texts(self) -> set[str]:
        return {rule.text for rule in self.found().rules}

    def pip(self) -> set[str]:
        return self.texts() - NPM_DEFAULT

    def npm(self) -> set[str]:
        return self.texts() - PIP_DEFAULT


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def _conf(url: str, section: str = "global") -> str:
    return f"[{section}]\nindex-url = {url}\n"


def test_nothing_configured(world: World) -> None:
    found = world.found()
    assert world.texts() == DEFAULT
    assert not found.warnings
    assert all(rule.local for rule in found.rules), "in a closed network its resolver leads to a mirror"
    assert {rule.source for rule in found.rules} == {"@package-indexes"}


PIP_FILES = [
    "/etc/xdg/pip/pip.conf", "/etc/pip.conf", "/home/me/.pip/pip.conf", "/home/me/.config/pip/pip.conf",
    "/usr/pip.conf",
]  # fmt: skip


@pytest.mark.parametrize("path", PIP_FILES)
def test_pip_files(world: World, path: str) -> None:
    world.put(path, _conf("https://mirror.corp/simple"))
    assert world.pip() == {"https://mirror.corp"}
    assert all(rule.local for rule in world.found().rules if "mirror" in rule.text)


def test_pip_precedence(world: World) -> None:
    """The later file wins, [install] beats [global] wherever it stands, the environment beats all."""
    for number, path in enumerate(PIP_FILES):
        world.put(path, _conf(f"https://m{number}.corp/simple"))
        assert world.pip() == {f"https://m{number}.corp"}
    world.put(PIP_FILES[0], _conf("https://install.corp", "install"))
    assert world.pip() == {"https://install.corp"}
    world.put("/named.conf", _conf("https://named.corp", "install"))
    world.env["PIP_CONFIG_FILE"] = "/named.conf"
    assert world.pip() == {"https://named.corp"}
    world.env["PIP_INDEX_URL"] = "https://env.corp:8443/simple"
    assert world.pip() == {"env.corp:8443"}
    del world.env["PIP_INDEX_URL"]
    world.env["PIP_CONFIG_FILE"] = os.devnull
    assert world.pip() == PIP_DEFAULT


def test_a_named_file_replaces_the_users(world: World) -> None:
    world.put("/home/me/.config/pip/pip.conf", "[global]\nextra-index-url = https://user.corp\n")
    world.put("/named.conf", "[global]\ntimeout = 3\n")
    assert "https://user.corp" in world.pip()
    world.env["PIP_CONFIG_FILE"] = "/named.conf"
    assert "https://user.corp" not in world.pip()


def test_pip_places_from_the_environment(world: World) -> None:
    world.put("/xdg/pip/pip.conf", _conf("https://a.corp"))
    world.env["XDG_CONFIG_HOME"] = "/xdg"
    assert world.pip() == {"https://a.corp"}
    world.put("/venv/pip.conf", _conf("https://b.corp"))
    world.env["VIRTUAL_ENV"] = "/venv"
    assert world.pip() == {"https://b.corp"}


def test_pip_extras(world: World) -> None:
    world.put("/etc/pip.conf", """
[global]
index_url = https://pypi.org/simple
extra-index-url =
    https://one.corp/simple
    http://two.corp:8080/simple
find-links = https://wheels.corp/  /srv/wheels  file:///srv/more
""")  # fmt: skip
    assert world.pip() == {*PIP_DEFAULT, "https://one.corp", "two.corp:8080", "https://wheels.corp"}
    world.env["PIP_NO_INDEX"] = "1"
    assert world.pip() == {"https://wheels.corp"}
    world.env.clear()
    world.env["PIP_EXTRA_INDEX_URL"] = "https://three.corp https://four.corp"
    assert {"https://three.corp", "https://four.corp"} <= world.pip()
    assert "https://one.corp" not in world.pip()


@pytest.mark.parametrize("text", ["", "nonsense", "[global\nindex-url", "[global]\nindex-url\n", "\0\xff", "[x]\na=b"])
def test_a_broken_pip_file(world: World, text: str) -> None:
    world.put("/etc/pip.conf", text)
    assert world.pip() == PIP_DEFAULT


def test_npm(world: World) -> None:
    world.put("/etc/npmrc", "registry=https://global.corp/\n")
    assert world.npm() == {"https://global.corp"}
    world.put("/home/me/.npmrc", f"""
; a comment = registry
# registry=https://no.corp
registry = "https://user.corp/npm/"
@scope:registry=https://npm.pkg.corp:4873
//npm.pkg.corp:4873/:_authToken={TOKEN}
@other:registry=${{OTHER_REGISTRY}}
""")  # fmt: skip
    world.env["OTHER_REGISTRY"] = f"https://me:{TOKEN}@other.corp/x"
    assert world.npm() == {"https://user.corp", "npm.pkg.corp:4873", "https://other.corp"}
    world.env["NPM_CONFIG_REGISTRY"] = "https://env.corp"
    assert "https://env.corp" in world.npm()
    assert "https://user.corp" not in world.npm()
    world.put("/my.npmrc", "registry=https://named.corp")
    world.env.clear()
    world.env["npm_config_userconfig"] = "/my.npmrc"
    assert world.npm() == {"https://named.corp"}
    world.env["npm_config_globalconfig"] = "/nothing"
    world.env["npm_config_userconfig"] = "/nothing"
    assert world.npm() == NPM_DEFAULT


def test_apt_one_line(world: World) -> None:
    world.put("/etc/apt/sources.list", """
# deb http://no.corp/debian stable main
deb http://deb.debian.org/debian stable main
deb-src [ arch=amd64,arm64 signed-by=/usr/share/keyrings/a b.gpg ] https://src.corp:8443/debian stable main
deb [trusted=yes] http://[fd00::1]:3142/debian stable main
 deb   http://10.1.2.3/debian   stable main # a comment
debris http://no.corp
deb cdrom:[Debian]/ stable main
deb file:/srv/debian ./
""")  # fmt: skip
    world.put("/etc/apt/sources.list.d/more.list", f"deb https://user:{TOKEN}@private.corp/x ./\n")
    world.put("/etc/apt/sources.list.d/more.save", "deb https://no.corp/x ./\n")
    assert world.texts() - DEFAULT == {
        "http://deb.debian.org", "src.corp:8443", "[fd00::1]:3142", "10.1.2.3:80", "https://private.corp",
    }  # fmt: skip


def test_apt_deb822(world: World) -> None:
    world.put("/etc/apt/sources.list.d/debian.sources", """
# a comment
Types: deb deb-src
URIs: https://one.corp/debian
 http://two.corp/debian
# between
 http://three.corp:81/debian
Suites: stable
Components: main
Signed-By:
 -----BEGIN PGP PUBLIC KEY BLOCK-----
 .
 http://no.corp/in-a-key
 -----END PGP PUBLIC KEY BLOCK-----

Enabled: no
Types: deb
URIs: http://disabled.corp

types: deb
uris: mirror+file:/etc/apt/mirrors/debian.list
suites: stable
""")  # fmt: skip
    world.put("/etc/apt/mirrors/debian.list", "# mirrors\nhttps://four.corp/debian priority:1\n\nhttps://five.corp\n")
    assert world.texts() - DEFAULT == {
        "https://one.corp", "http://two.corp", "three.corp:81", "https://four.corp", "https://five.corp",
    }  # fmt: skip


def test_apt_mirrors_that_a_server_names(world: World) -> None:
    world.put("/etc/apt/sources.list", "deb mirror://mirrors.corp/list.txt stable main\ndeb tor+http://x.onion/ a b\n")
    found = world.found()
    assert "http://mirrors.corp" in world.texts()
    assert any("mirrors.corp for a list of mirrors" in text for text in found.warnings)
    assert any("tor+http://" in text for text in found.warnings)


@pytest.mark.parametrize(
    ("url", "rule"),
    [("http://localhost:3141/root/pypi", "host.sloplet:3141"), ("http://127.0.0.1:8081", "host.sloplet:8081"),
     ("https://127.0.0.1/simple", "host.sloplet:443"), ("http://[::1]:3141/", "host.sloplet:3141"),
     ("http://0x7f.1:9/", "host.sloplet:9")],
)  # fmt: skip
def test_a_mirror_on_the_hosts_loopback(world: World, url: str, rule: str) -> None:
    world.put("/etc/pip.conf", _conf(url))
    found = world.found()
    assert world.pip() == {rule}
    assert any(f"inside the sandbox that is {rule}" in text for text in found.warnings)
    policy = Policy(found.rules)
    assert policy.check_addresses("host.sloplet", int(rule.rpartition(":")[2]), ["127.0.0.1"])[0] == ["127.0.0.1"]


def test_a_mirror_at_a_private_address(world: World) -> None:
    world.put("/etc/pip.conf", _conf("http://mirror.corp:8080/simple"))
    world.put("/home/me/.npmrc", "registry=http://10.9.8.7:4873/")
    policy = Policy(world.found().rules)
    assert policy.check_addresses("mirror.corp", 8080, ["10.0.0.7"])[0] == ["10.0.0.7"]
    assert policy.check_addresses("mirror.corp", 8080, ["169.254.169.254"])[0] == []
    assert policy.judge("mirror.corp", 443).allow is False
    assert policy.judge_address("10.9.8.7", 4873).allow is True
    assert policy.judge_address("10.9.8.7", 80).allow is False
    assert policy.judge_address("10.0.0.7", 8080).allow is False


@pytest.mark.parametrize(
    "url",
    [f"https://user:{TOKEN}@mirror.corp/simple", f"https://{TOKEN}@mirror.corp/", f"https://u:p%40{TOKEN}@mirror.corp",
     f"https://mirror.corp/{TOKEN}/simple?k={TOKEN}", f"https://user:{TOKEN}@bad^host/", f"https://user:{TOKEN}@mirror.corp:bad/",
     f"git+ssh://user:{TOKEN}@mirror.corp/", f"https://user:{TOKEN}@[::1/", f"https://user:{TOKEN}@-bad-/", f"{TOKEN}"],
)  # fmt: skip
def test_no_token_is_shown(world: World, url: str) -> None:
    world.put("/home/me/.npmrc", f"registry={url}\n")
    world.env["PIP_INDEX_URL"] = url
    world.put("/etc/apt/sources.list", f"deb {url} stable main\n")
    found = world.found()
    assert TOKEN not in repr(found)
    assert all("mirror.corp" in text or text in DEFAULT for text in world.texts())


def test_variables_for_another_process() -> None:
    """What the keeper is given: enough to allow the same, and no more."""
    env = {
        "PIP_INDEX_URL": f"https://me:{TOKEN}@mirror.corp:8443/{TOKEN}/simple?{TOKEN}",
        "npm_config_registry": "http://[fd00::1]:4873/x",
        "PIP_EXTRA_INDEX_URL": f"https://{TOKEN}@a.corp https://b.corp nonsense https://[::1 http://c.corp:bad",
        "PIP_CERT": TOKEN,
        "PIP_CONFIG_FILE": "/etc/my.conf", "GITHUB_TOKEN": TOKEN, "npm_config__authToken": TOKEN,
        "PIP_FIND_LINKS": "/srv/wheels",
    }  # fmt: skip
    assert configured.variables(env) == {
        "PIP_INDEX_URL": "https://mirror.corp:8443", "npm_config_registry": "http://[fd00::1]:4873",
        "PIP_EXTRA_INDEX_URL": "https://a.corp https://b.corp file:///", "PIP_CONFIG_FILE": "/etc/my.conf",
        "PIP_FIND_LINKS": "file:///",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PIP_INDEX_URL", "file:///opt/pypi/simple"),
        ("PIP_INDEX_URL", "/opt/pypi/simple"),
        ("PIP_INDEX_URL", "https://[::1"),
        ("PIP_INDEX_URL", "  "),
        ("PIP_INDEX_URL", ""),
        ("PIP_INDEX_URL", "https://mirror.corp/simple /opt/more"),
        ("PIP_PYPI_URL", "https://mirror.corp/simple"),
        ("PIP_EXTRA_INDEX_URL", "file:///opt/more"),
        ("npm_config_registry", "file:///opt/npm"),
        ("npm_config_registry", "https://npm.corp/"),
    ],
)
def test_another_process_allows_what_this_one_would(world: World, name: str, value: str) -> None:
    world.env = {name: value}
    here = world.texts()
    world.env = configured.variables(world.env)
    assert world.texts() == here


def test_proxies_are_spoken_of(world: World) -> None:
    world.put("/etc/pip.conf", f"[global]\nproxy = http://me:{TOKEN}@proxy.corp:3128\n")
    world.put("/etc/apt/apt.conf.d/01proxy", f'Acquire::http::Proxy "http://me:{TOKEN}@proxy.corp:3128";\n')
    found = world.found()
    assert [text.split()[0] for text in found.warnings] == ["pip", "apt"]
    assert TOKEN not in repr(found)


def test_denied(world: World) -> None:
    world.put("/etc/pip.conf", _conf("https://mirror.corp"))
    rules = world.found().rules_for(deny=True)
    assert all(rule.deny and not rule.local for rule in rules)
    assert {rule.text for rule in rules} == world.texts()


def test_files_that_cannot_be_read(world: World) -> None:
    (world.root / "etc/pip.conf").mkdir(parents=True)
    world.put("/etc/apt/sources.list.d", "not a folder")
    (world.root / "home/me").mkdir(parents=True)
    os.mkfifo(world.root / "home/me/.npmrc")  # must not be waited for
    assert world.texts() == DEFAULT


def test_this_machine() -> None:
    """As it is: it can be read, by whoever runs this."""
    found = package_indexes()
    assert all(rule.source == "@package-indexes" for rule in found.rules)
    Policy(found.rules)


@pytest.mark.skipif(not shutil.which("pip"), reason="no pip here to compare with")
@pytest.mark.parametrize("env", [{}, {"PIP_INDEX_URL": "https://env.corp/simple"}, {"PIP_CONFIG_FILE": os.devnull}])
def test_as_pip_itself_sees_it(world: World, env: dict[str, str]) -> None:
    """Positive control: the real pip is asked for its index, with the same files and variables."""
    world.put(
        "/home/me/.config/pip/pip.conf",
        _conf("https://global.corp/simple") + _conf("https://install.corp/s", "install"),
    )
    world.put("/home/me/.pip/pip.conf", _conf("https://legacy.corp/simple"))
    home = world.root / "home/me"
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "XDG_"))}
    done = subprocess.run(
        [sys.executable, "-m", "pip", "config",
         "list"], env={**clean, "HOME": str(home), **env}, capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode:
        pytest.skip("this Python has no pip")
    told = dict(line.split("=", 1) for line in done.stdout.splitlines())
    expected = told.get(":env:.index-url") or told.get("install.index-url") or told.get("global.index-url", "")
    ours = Machine(home=home, env={**clean, **env})
    urls, default = configured.pip(ours)
    assert urls[:1] == ([expected.strip("'")] if expected else [])
    assert default is (not expected)
