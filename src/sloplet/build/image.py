"""``Image``: an image described in Python. Immutable: every method gives another one.

::

    image = Image("debian:12").apt("git").pip("numpy").copy("src", "/app").env(A="1").workdir("/app")
    with Sandbox(image=image) as box: ...
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import RecipeInvalid, SpecError
from ..finding import place_of
from ..netspec import Network
from .dockerfile import Dockerfile, Stage, parse
from .instructions import Command, Copy, Env, From, Instruction, Label, Mount, Names, Run, Text
from .lines import Line

if TYPE_CHECKING:
    from ..controller import Controller
    from ..images.store import StoredImage
    from ..remote.place import Place
    from ..state.home import Home
    from .bootstrap import Bootstrap
    from .events import OnBuildEvent

_APT_RE = re.compile(r"[a-z0-9][a-z0-9+.-]*(?::[a-z0-9-]+)?(?:=[A-Za-z0-9.+:~-]+|/[a-z-]+)?\Z")
_NAME_RE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_SPECIAL_RE = re.compile(r"([\\$'\"])")
_PACKAGES = Network(allow=["@package-indexes"])
_CLEAN = "rm -rf /var/lib/apt/lists/* /var/cache/apt/*.bin /var/cache/ldconfig/aux-cache /var/log/apt /var/log/dpkg.log /var/log/alternatives.log"  # noqa: E501
_OPTIONS = "-o APT::Sandbox::User=root -q"
_APT = f"apt-get {_OPTIONS} update && apt-get {_OPTIONS} install -y {{}} && apt-get clean && {_CLEAN}"


@dataclass(frozen=True)
class Image:
    """An image to be built: from another (``Image("debian:12")``), a Dockerfile, or a distribution's packages.

    ``build`` builds it, from the cache where that has been done before; ``Sandbox(image=...)`` does it by itself.
    """

    base: str = "scratch"
    _steps: tuple[Instruction, ...] = field(default=(), repr=False)
    _recipe: Dockerfile | None = field(default=None, repr=False, compare=False)
    _context: Path | None = field(default=None, repr=False)
    _path: Path | None = field(default=None, repr=False)
    _target: str | None = field(default=None, repr=False)
    _arguments: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    _bootstrap: Bootstrap | None = field(default=None, repr=False)
    _images: tuple[tuple[str, Image], ...] = field(default=(), repr=False)

    # -- where it begins -----------------------------------------------------------

    @staticmethod
    def dockerfile(
        path: str | os.PathLike[str] = "Dockerfile",
        *,
        context: str | os.PathLike[str] | None = None,
        target: str | None = None,
        build_args: Mapping[str, str] | None = None,
    ) -> Image:
        """A Dockerfile, or the folder of one; ``context`` is the folder that COPY takes from (its own by default).
        Steps that are added come after those of its target. RecipeInvalid."""
        found = Path(path)
        found = found / "Dockerfile" if found.is_dir() else found
        recipe = parse(read_recipe(found), found.name)
        folder = found.parent if context is None else Path(context)
        given = tuple(sorted((build_args or {}).items()))
        return Image(os.fspath(path), (), recipe, folder.absolute(), found.absolute(), target, given)

    @staticmethod
    def bootstrap(
        distribution: str = "debian:bookworm",
        packages: Sequence[str] = (),
        *,
        variant: str = "minbase",
        mirror: str | None = None,
    ) -> Image:
        """A root filesystem made of a distribution's packages (mmdebstrap), from where this machine's own apt gets
        them; no registry is needed. Made anew when the package lists of this machine have changed."""
        from .bootstrap import Bootstrap

        return Image(distribution, _bootstrap=Bootstrap.make(distribution, packages, variant=variant, mirror=mirror))

    # -- steps ---------------------------------------------------------------------

    def run(self, command: str | Sequence[str], *, network: Any = None) -> Image:
        """Run a command: text goes to the shell, a list is the argument vector. ``network``: what it may reach if the
        build as a whole is asked for none."""
        if isinstance(command, str):
            if not command.strip():
                raise SpecError("run() needs a command")
            return self._add(lambda line: Run(line, text=command, policy=network), "RUN", command)
        argv = _words("run", command)
        return self._add(lambda line: Run(line, argv=argv, policy=network), "RUN", shlex.join(argv))

    def apt(self, *packages: str, recommends: bool = False) -> Image:
        """Install packages of the image's distribution by apt; reaches the package indexes of this machine."""
        for name in packages:
            if not isinstance(name, str) or not _APT_RE.match(name):
                raise SpecError(
                    f"apt({str(name)[:80]!r}) is no package", hint="for example apt('git', 'curl=7.88.1-10')"
                )
        more = "" if recommends else "--no-install-recommends "
        command = _APT.format(f"{more}{shlex.join(sorted(packages))}")
        return self._install(packages, command, "apt")

    def pip(self, *packages: str, requirements: str | os.PathLike[str] | None = None) -> Image:
        """Install Python packages by the image's pip, which its distribution's packages bring where there is none;
        reaches the package indexes of this machine."""
        words = _words("pip", packages) if packages else ()
        command = f"python3 -m pip install {shlex.join(words)}".strip()
        if requirements is not None:
            text = read_recipe(Path(requirements))
            command += f" -r /dev/stdin <<'SLOPLET-REQUIREMENTS'\n{text.rstrip()}\nSLOPLET-REQUIREMENTS"
            words = (*words, os.fspath(requirements))
        bring = _bring("python3 -m pip --version", apt="python3-pip", apk="py3-pip", dnf="python3-pip")
        return self._install(words, command, "pip", bring)

    def npm(self, *packages: str) -> Image:
        """Install Node packages for everybody by the image's npm, which its distribution's packages bring where there
        is none; reaches the package indexes of this machine."""
        words = _words("npm", packages)
        command = f"npm install -g --no-audit --no-fund {shlex.join(words)} && rm -rf /tmp/.npm"
        return self._install(words, command, "npm", _bring("npm --version", apt="npm", apk="npm", dnf="npm"))

    def _install(self, packages: Sequence[str], command: str, index: str, first: str = "") -> Image:
        if not packages:
            raise SpecError("no package is named", hint="for example .apt('git') or .pip('numpy')")
        of_index = for_index(index)
        return self._add(
            lambda line: Run(line, text=first + command, policy=_PACKAGES, index=index, **of_index), "RUN", command
        )

    def copy(
        self,
        source: str | os.PathLike[str],
        target: str,
        *,
        chown: str | None = None,
        chmod: int | str | None = None,
        image: str | Image | None = None,
        exclude: Sequence[str] = (),
    ) -> Image:
        """Copy a file, or what is in a folder, of this machine into the image; with ``image``, of another image."""
        mode = f"{chmod:o}" if isinstance(chmod, int) else chmod
        path = os.fspath(source)
        facts = {"chown": chown, "chmod": mode, "exclude": tuple(map(literal, exclude))}
        if image is None:
            absolute = os.path.abspath(path)
            folder, name = (absolute, ".") if os.path.isdir(absolute) else os.path.split(absolute)
            return self._add(
                lambda line: Copy(line, (literal(name),), literal(target), folder=folder, **facts),  # type: ignore[arg-type]
                "COPY", f"{path} {target}",
            )  # fmt: skip
        others = self._images if isinstance(image, str) else (*self._images, (f"image-{len(self._images)}", image))
        origin = image if isinstance(image, str) else others[-1][0]
        made = self._add(
            lambda line: Copy(line, (literal(path),), literal(target), origin=origin, **facts),  # type: ignore[arg-type]
            "COPY", f"--from={image if isinstance(image, str) else image.base} {path} {target}",
        )  # fmt: skip
        return replace(made, _images=others)

    def env(self, **variables: str) -> Image:
        """Variables for all later steps, and for what runs in the image."""
        return self._pairs("ENV", variables)

    def label(self, labels: Mapping[str, str] | None = None, /, **more: str) -> Image:
        return self._pairs("LABEL", {**(labels or {}), **more})

    def _pairs(self, keyword: str, pairs: Mapping[str, str]) -> Image:
        kind = Env if keyword == "ENV" else Label
        for name, value in pairs.items():
            if not isinstance(value, str) or (keyword == "ENV" and not _NAME_RE.match(name)):
                raise SpecError(f"{name[:80]}={str(value)[:80]!r} is no text with a name")
        given = tuple((literal(name), literal(value)) for name, value in pairs.items())
        return self._add(lambda line: kind(line, given), keyword, " ".join(f"{k}={v}" for k, v in pairs.items()))

    def workdir(self, path: str) -> Image:
        """Where later steps, and commands in the image, begin; made if it is missing."""
        return self._text("WORKDIR", path)

    def user(self, user: str) -> Image:
        """Who later steps, and commands in the image, run as: a name or uid, with :group."""
        return self._text("USER", user)

    def _text(self, keyword: str, value: str) -> Image:
        if not isinstance(value, str) or not value:
            raise SpecError(f"{keyword.lower()}({str(value)[:80]!r}) is no text")
        return self._add(lambda line: Text(line, literal(value)), keyword, value)

    def entrypoint(self, *argv: str) -> Image:
        return self._command("ENTRYPOINT", argv)

    def cmd(self, *argv: str) -> Image:
        """What the image runs by itself; with an entrypoint, its arguments."""
        return self._command("CMD", argv)

    def shell(self, *argv: str) -> Image:
        """What runs commands that are text; ``("/bin/sh", "-c")`` by default."""
        return self._command("SHELL", argv)

    def _command(self, keyword: str, argv: Sequence[str]) -> Image:
        words = _words(keyword.lower(), argv)
        return self._add(lambda line: Command(line, argv=words), keyword, json.dumps(list(words)))

    def expose(self, *ports: int | str) -> Image:
        return self._add(
            lambda line: Names(line, words=tuple(literal(str(port)) for port in ports)),
            "EXPOSE",
            " ".join(map(str, ports)),
        )

    def volume(self, *paths: str) -> Image:
        return self._add(lambda line: Names(line, words=tuple(map(literal, paths))), "VOLUME", " ".join(paths))

    def _add(self, make: Any, keyword: str, shown: str) -> Image:
        line = Line(len(self._steps) + 2, keyword, shown, name="Image")
        return replace(self, _steps=(*self._steps, make(line)))

    # -- building --------------------------------------------------------------------

    def build(self, tag: str | Sequence[str] | None = None, **options: Any) -> StoredImage:
        """Build it, or find it built. ``options`` as of ``build_async``."""
        from ..portal import portal

        return portal().call(self.build_async(tag, **options))

    async def build_async(
        self,
        tag: str | Sequence[str] | None = None,
        *,
        network: Any = "none",
        no_cache: bool = False,
        pull: bool = False,
        build_args: Mapping[str, str] | None = None,
        secrets: Mapping[str, bytes | str] | None = None,
        on_event: OnBuildEvent | None = None,
        engine: str = "auto",
        at_least: str | None = None,
        server: str | None = None,
        key: str | None = None,
        ca: str | os.PathLike[str] | None = None,
        home: Home | None = None,
        controller: Controller | None = None,
        **limits: Any,
    ) -> StoredImage:
        """Build it, or find it built; it is called ``tag`` from now on. ``network``: what its steps may reach;
        ``engine``, ``at_least``: what they run on, a container by default; ``limits``: cpus, memory, disk, pids of
        each. With ``server`` and ``key`` (or SLOPLET_URL and SLOPLET_KEY) it is built there, of this machine's files;
        else in ``home``, by sandboxes of ``controller``. RecipeInvalid, BuildFailed; what images and sandboxes raise.
        """
        return await self._built(
            place_of(server, key, ca), tag, network=network, no_cache=no_cache, pull=pull, build_args=build_args,
            secrets=secrets, on_event=on_event, engine=engine, at_least=at_least, limits=limits, home=home,
            controller=controller,
        )  # fmt: skip

    async def _built(
        self, place: Place | None, tag: str | Sequence[str] | None = None, *, network: Any = "none",
        no_cache: bool = False, pull: bool = False, build_args: Mapping[str, str] | None = None,
        secrets: Mapping[str, bytes | str] | None = None, on_event: OnBuildEvent | None = None, engine: str = "auto",
        at_least: str | None = None, limits: Mapping[str, Any] | None = None, home: Home | None = None,
        controller: Controller | None = None,
    ) -> StoredImage:  # fmt: skip
        from .events import silent
        from .executor import Builder, BuildOptions, parse_tags
        from .running import RunSettings

        names = (tag,) if isinstance(tag, str) else tuple(tag or ())
        inner: dict[str, Any] = {
            "network": network, "no_cache": no_cache, "pull": pull, "on_event": on_event, "engine": engine,
            "at_least": at_least, "limits": limits, "home": home, "controller": controller,
        }  # fmt: skip
        others = {name: (await other._built(place, **inner)).id for name, other in self._images}
        recipe = await self._whole(others, no_cache, on_event, place, home)
        options = BuildOptions(
            tags=parse_tags(names), build_args={**dict(self._arguments), **(build_args or {})}, target=self._target,
            settings=RunSettings(network, limits or {}, engine, at_least=at_least), no_cache=no_cache, pull=pull,
            secrets=self._secrets(secrets or {}, place), epoch=source_date_epoch(),
        )  # fmt: skip
        if place is not None:
            from ..remote.building import build
            from ..remote.images import RemoteImages

            return await build(
                RemoteImages(place), recipe, options, on_event or silent, context=self._context,
                dockerfile_path=self._path,
            )  # fmt: skip
        builder = Builder(
            recipe, options, home=home, context=self._context, dockerfile_path=self._path,
            on_event=on_event or silent, controller=controller,
        )  # fmt: skip
        return await builder.build()

    def _secrets(self, given: Mapping[str, bytes | str], place: Place | None) -> dict[str, bytes]:
        found = {key: item.encode() if isinstance(item, str) else item for key, item in given.items()}
        return with_trust(found, self._steps) if place is None else found  # whom a server trusts it knows itself

    async def resolve_reference(
        self, *, engine: str = "auto", at_least: str | None = None, place: Place | None = None
    ) -> str:
        """What ``Sandbox(image=...)`` starts from; its steps are not less isolated than that is."""
        engine = "auto" if engine in ("process", "fake") else engine  # which have no root of their own
        return (await self._built(place, engine=engine, at_least=at_least)).id

    async def _whole(
        self, others: Mapping[str, str], no_cache: bool, on_event: OnBuildEvent | None, place: Place | None,
        home: Home | None = None,
    ) -> Dockerfile:  # fmt: skip
        steps = [replace(step, origin=others.get(step.origin or "", step.origin)) if isinstance(step, Copy) else step
                 for step in self._steps]  # fmt: skip
        if self._recipe is not None:
            from .plan import target_of

            chosen = target_of(self._recipe, self._target)
            stages = [
                replace(stage, steps=[*stage.steps, *steps]) if stage.index == chosen else stage
                for stage in self._recipe.stages
            ]
            return replace(self._recipe, stages=stages)
        base = self.base
        if self._bootstrap is not None:
            from .bootstrap import make

            made = await make(
                self._bootstrap, no_cache=no_cache, on_event=on_event, epoch=source_date_epoch(), home=home
            )
            base = made.id if place is None else await _brought(made, place)
        first = From(Line(1, "FROM", self.base, name="Image"), literal(base))
        return Dockerfile([Stage(0, first, steps)], name="Image")


async def _brought(image: StoredImage, place: Place) -> str:
    """An image that was made here, on a server."""
    from ..images.store import ImageStore
    from ..remote.building import bring
    from ..remote.images import RemoteImages
    from ..state.home import Home

    return await bring(RemoteImages(place), image, ImageStore(Home()))


def for_index(index: str) -> dict[str, Any]:
    """The variables and mounts of a step that installs from an index of this machine: apt, pip or npm."""
    from .indexes import TRUST, npm_environment, pip_environment, trust_environment, trusted

    env = {"DEBIAN_FRONTEND": "noninteractive"}
    if index != "apt":
        env = pip_environment() if index == "pip" else npm_environment()
    mounts: tuple[Mount, ...] = ()
    if trusted() is not None:
        env |= trust_environment()
        mounts = (Mount("secret", (("id", TRUST), ("mode", "444"))),)
    return {"env": tuple(sorted(env.items())), "mounts": mounts}


def with_trust(secrets: Mapping[str, bytes], steps: Iterable[Instruction]) -> dict[str, bytes]:
    """Secrets of a build, and this machine's list of authorities for steps that install from its indexes."""
    from .indexes import TRUST, trusted

    found = dict(secrets)
    if any(isinstance(step, Run) and step.index for step in steps) and (list_of := trusted()) is not None:
        found.setdefault(TRUST, list_of)
    return found


def literal(text: str) -> str:
    """Text that comes out of a Dockerfile's expansion as it is."""
    return _SPECIAL_RE.sub(r"\\\1", text)


def _bring(there: str, *, apt: str, apk: str, dnf: str) -> str:
    """The beginning of a command: what has a program installed whose image has none, where it can be."""
    return (
        f"if {there} >/dev/null 2>&1; then :; "
        "elif command -v apt-get >/dev/null; then export DEBIAN_FRONTEND=noninteractive; "
        f"{_APT.format(f'--no-install-recommends {apt}')}; "
        f"elif command -v apk >/dev/null; then apk add --no-cache {apk}; "
        f"elif command -v dnf >/dev/null; then dnf -y install {dnf} && dnf clean all; fi && "
    )


def _words(what: str, argv: Sequence[str]) -> tuple[str, ...]:
    if isinstance(argv, str) or not argv or not all(isinstance(word, str) and word for word in argv):
        raise SpecError(f"{what}() takes words", hint=f"for example {what}('a', 'b')")
    return tuple(argv)


def read_recipe(path: Path) -> str:
    """The text of a Dockerfile. RecipeInvalid."""
    try:
        return path.read_text("utf-8")
    except FileNotFoundError:
        raise RecipeInvalid(f"there is no {path}", hint="name it with -f FILE") from None
    except UnicodeDecodeError:
        raise RecipeInvalid(f"{path} is not UTF-8 text") from None
    except OSError as error:
        raise RecipeInvalid(f"{path} cannot be read: {error.strerror}") from error


def source_date_epoch() -> int:
    """SOURCE_DATE_EPOCH of this process: the time that all files of a build have. RecipeInvalid."""
    from .layertar import DEFAULT_EPOCH

    text = os.environ.get("SOURCE_DATE_EPOCH", "")
    if not text:
        return DEFAULT_EPOCH
    if not text.isdecimal() or int(text) >= 2**33:
        raise RecipeInvalid(f"SOURCE_DATE_EPOCH={text[:40]!r} is no time", hint="seconds since 1970")
    return int(text)
