"""Carries a plan out in a sandbox that has just started, as root inside, through its agent."""

from __future__ import annotations

import asyncio
import posixpath
import re
from collections.abc import Callable, Sequence
from contextlib import suppress

from ..controller import Stream
from ..errors import BuildFailed, CommandError, FileError, UserNotFound
from ..files import AsyncFiles, Opener
from ..process import collect, exec_request, make_capture
from ..results import Result
from ..spec import DEFAULT_WORKDIR
from ..wire.fields import Fields
from .accounts import Account, Accounts
from .packages import LOOK, commands_for
from .plan import Command, File, Packages, Plan, User

#: Takes the name of a module as it begins.
OnModule = Callable[[str], None]
_STATE = "/var/lib/cloud/instance"
_LOG = "/var/log/cloud-init-output.log"
_AT = f"{_STATE}/sloplet-at"
_LONGEST = 3600.0
_TAIL = 4000
_MAX_ETC = 4 * 2**20
_ROOT = "0:0"
_SERVICES_RE = re.compile(r"\b(systemctl|rc-service|service)\s")
_NO_SERVICES = "a sandbox has no systemd: start the program itself (`nginx &`), or write `|| true` behind it"


async def apply(plan: Plan, text: str, open_stream: Opener, *, user: str, tell: OnModule = lambda module: None) -> None:
    """``user``: the sandbox's own, whom ``default`` stands for. BuildFailed with the module, the line, the command and
    the end of its output; errors of the sandbox itself as they are."""
    job = _Job(plan, open_stream, user, tell)
    try:
        async with asyncio.timeout(_LONGEST):
            await job.run(text)
    except TimeoutError:
        raise BuildFailed(f"cloud-init, {job.module}: it takes longer than an hour", hint="build an image") from None
    except FileError as error:
        raise BuildFailed(f"cloud-init, {job.module}: {error.message}", hint=error.hint) from error


class _Job:
    def __init__(self, plan: Plan, open_stream: Opener, user: str, tell: OnModule) -> None:
        self.plan = plan
        self.open = open_stream
        self.files = _RootFiles(open_stream)
        self.user = user.partition(":")[0]  # as images write it: USER, or USER:GROUP
        self.tell = tell
        self.module = "start"
        self.log: list[bytes] = []

    def begin(self, module: str) -> None:
        self.module = module
        self.tell(module)

    async def run(self, text: str) -> None:
        plan = self.plan
        await self.files.mkdir(f"{_STATE}/scripts", mode=0o700)
        await self.files.write(f"{_STATE}/user-data.txt", text.encode("utf-8", "surrogatepass"), mode=0o600)
        await self.commands("bootcmd", plan.bootcmd)
        await self.write("write_files", plan.files)
        await self.people()
        await self.place()
        if plan.packages is not None:
            await self.packages(plan.packages)
        await self.write("write_files, deferred", plan.deferred)
        await self.commands("runcmd", plan.runcmd)
        self.begin("final")
        if plan.message is not None:
            self.log.append(plan.message.encode("utf-8", "surrogateescape") + b"\n")
        await self.files.mkdir(posixpath.dirname(_LOG))
        await self.files.write(_LOG, b"".join(self.log), mode=0o640, append=True)
        await self.files.write(f"{_STATE}/boot-finished", b"", mode=0o644)

    # -- files -------------------------------------------------------------------------

    async def write(self, module: str, files: Sequence[File]) -> None:
        if files:
            self.begin(module)
        for file in files:
            try:
                await self.files.write(file.path, file.content, mode=file.mode, append=file.append)
                await self.files.chown(file.path, file.owner)
                await self.files.chmod(file.path, file.mode)  # a change of owner takes bits away
            except (FileError, CommandError) as error:
                early = isinstance(error, UserNotFound) and module == "write_files"
                raise BuildFailed(
                    f"cloud-init, {module}, line {file.line}: {file.path}: {error.message}",
                    hint="files of who comes with users: or packages: need defer: true" if early else error.hint,
                ) from error

    # -- users -------------------------------------------------------------------------

    async def people(self) -> None:
        plan = self.plan
        if not (plan.users or plan.groups or plan.default_keys):
            return
        self.begin("users")
        before = {path: await self.text(path) for path in ("/etc/passwd", "/etc/group", "/etc/shadow")}
        accounts = Accounts(*before.values())
        for group in plan.groups:
            accounts.add_group(group)
        shell = "/bin/bash" if await self.files.exists("/bin/bash") else "/bin/sh"
        made = []
        for user in plan.users:
            if (account := accounts.add_user(user, self.user, shell)) is not None:
                made.append((user, account))
        for path, text in accounts.texts.items():
            await self.replace(path, text, 0o640 if path == "/etc/shadow" else 0o644)
        for user, account in made:
            await self.settle(user, account)
        if plan.default_keys and (own := accounts.find(self.user)) is not None:
            await self.authorize(own, plan.default_keys)

    async def settle(self, user: User, account: Account) -> None:
        if account.new and user.create_home and not await self.files.exists(account.home):
            await self.files.mkdir(account.home, mode=0o755)
            fill = 'if [ -d /etc/skel ]; then cp -R /etc/skel/. "$1"/; fi && chown -R "$2" "$1"'
            await self.must(["/bin/sh", "-c", fill, "sh", account.home, account.owner], user.line)
        if account.new and account.name == self.user:
            await self.hand_over(account)
        if user.keys:
            await self.authorize(account, user.keys)
        if user.sudo:
            path = "/etc/sudoers.d/90-cloud-init-users"
            rules = "".join(f"{account.name} {rule}\n" for rule in user.sudo)
            await self.files.mkdir("/etc/sudoers.d")
            await self.replace(path, await self.text(path) + rules, 0o440)

    async def hand_over(self, account: Account) -> None:
        """The sandbox's own user is made only now: the folder that was made for him when it started is root's."""
        with suppress(FileNotFoundError):
            made = await self.files.stat(DEFAULT_WORKDIR)
            if made.is_dir and made.uid == 0 and not await self.files.list(DEFAULT_WORKDIR):
                await self.files.chown(DEFAULT_WORKDIR, account.owner)

    async def authorize(self, account: Account, keys: Sequence[str]) -> None:
        folder = f"{account.home.rstrip('/')}/.ssh"
        path = f"{folder}/authorized_keys"
        await self.files.mkdir(folder, mode=0o700)
        known = (await self.text(path)).splitlines()
        known += [key.strip() for key in keys if key.strip() not in known]
        await self.files.write(
            path, "".join(line + "\n" for line in known).encode("utf-8", "surrogateescape"), mode=0o600
        )
        for each in (folder, path):
            await self.files.chown(each, account.owner)

    # -- where it is -------------------------------------------------------------------

    async def place(self) -> None:
        plan = self.plan
        if plan.locale is not None:
            self.begin("locale")
            await self.files.write("/etc/default/locale", f"LANG={plan.locale}\n".encode())
        if plan.timezone is not None:
            self.begin("timezone")
            line, zone = plan.timezone
            if not await self.files.exists(f"/usr/share/zoneinfo/{zone}"):
                raise BuildFailed(
                    f"cloud-init, timezone, line {line}: the image knows no {zone!r}", hint="has it the package tzdata?"
                )
            await self.files.remove("/etc/localtime", missing_ok=True)
            await self.files.symlink("/etc/localtime", f"/usr/share/zoneinfo/{zone}")
            await self.files.write("/etc/timezone", f"{zone}\n".encode())
        if plan.env:
            self.begin("env")
            lines = "".join(f"{name}={_quoted(value)}\n" for name, value in sorted(plan.env.items()))
            await self.replace("/etc/environment", await self.text("/etc/environment") + lines, 0o644)

    # -- commands ----------------------------------------------------------------------

    async def packages(self, wanted: Packages) -> None:
        self.begin("packages")
        found = (await self.exec(["/bin/sh", "-c", LOOK])).stdout.split()
        for argv in commands_for(wanted, found):
            await self.must(argv, wanted.line, env={"DEBIAN_FRONTEND": "noninteractive"})

    async def commands(self, module: str, items: Sequence[Command]) -> None:
        """As one script, as cloud-init does it: what one item sets, the next ones have. Unlike there, one that fails is
        the end of it."""
        if not items:
            return
        self.begin(module)
        path = f"{_STATE}/scripts/{module}"
        script = "#!/bin/sh\n" + "".join(
            f"echo {number} >{_AT}\n{item.script}\n__sloplet=$?; [ $__sloplet = 0 ] || exit $__sloplet\n"
            for number, item in enumerate(items)
        )
        await self.files.write(path, script.encode("utf-8", "surrogateescape"), mode=0o700)
        result, tail = await self.watched(["/bin/sh", path], {})
        if not result.ok:
            at = (await self.text(_AT)).strip()
            item = items[int(at)] if at.isdecimal() and len(at) < 6 and int(at) < len(items) else items[0]
            failure = self.failed(result, item.line, item.script, tail)
            failure.hint = _NO_SERVICES if _SERVICES_RE.search(item.script) else None
            raise failure
        await self.files.remove(_AT, missing_ok=True)

    async def must(self, argv: Sequence[str], line: int, *, env: dict[str, str] | None = None) -> None:
        result, tail = await self.watched(argv, env or {})
        if not result.ok:
            raise self.failed(result, line, " ".join(argv), tail)

    def failed(self, result: Result, line: int, command: str, tail: str) -> BuildFailed:
        shown = command if len(command) <= 300 else command[:297] + "..."
        message = f"cloud-init, {self.module}, line {line}: {shown}: {result.describe()}"
        return BuildFailed(f"{message}\n{tail}" if tail else message)

    async def watched(self, argv: Sequence[str], env: dict[str, str]) -> tuple[Result, str]:
        """Its result, and the end of what it printed on both ways, in the order in which it came."""
        last = bytearray()

        def take(data: bytes) -> None:
            last.extend(data)
            del last[:-_TAIL]

        result = await self.exec(argv, env, take)
        tail = bytes(last)
        self.log.append(tail)
        return result, tail.decode("utf-8", "replace").strip()

    async def exec(
        self, argv: Sequence[str], env: dict[str, str] | None = None, take: Callable[[bytes], None] | None = None
    ) -> Result:
        request = exec_request(list(argv), cwd="/", env=env, user=_ROOT, timeout=_LONGEST)
        try:
            return await collect(await self.open(request), make_capture(65536, False, take, take))
        except CommandError as error:
            raise BuildFailed(f"cloud-init, {self.module}: {argv[0]}: {error.message}", hint=error.hint) from error

    # -- small things ------------------------------------------------------------------

    async def text(self, path: str) -> str:
        try:
            return (await self.files.read(path, max_bytes=_MAX_ETC)).decode("utf-8", "surrogateescape")
        except FileNotFoundError:
            return ""

    async def replace(self, path: str, text: str, mode: int) -> None:
        """Another content, the same owner and permissions; ``mode`` where it is new."""
        owner = None
        try:
            old = await self.files.stat(path)
            mode, owner = old.mode & 0o7777, f"{old.uid}:{old.gid}"
        except FileNotFoundError:
            pass
        await self.files.write(path, text.encode("utf-8", "surrogateescape"), mode=mode)
        if owner not in (None, _ROOT):
            await self.files.chown(path, owner or _ROOT)


class _RootFiles(AsyncFiles):
    """Files, as root."""

    def __init__(self, open_stream: Opener) -> None:
        async def as_root(fields: Fields) -> Stream:
            from ..wire.schema import Tag

            return await open_stream(fields.add(Tag.USER, _ROOT))

        super().__init__(as_root)


def _quoted(value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
