"""``sloplet bench``: Sloplet and its rivals, side by side."""

from __future__ import annotations

import json as json_
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from ..testing.bench.stats import Report

SUITES = ("start", "exec", "code", "cli", "import", "rate", "files", "output", "live")
LIVE_SUITES = ("snapshot", "restore", "fork", "pool", "pause", "weight", "curve")
NET_SUITES = ("download", "connect", "together", "slow")
IMAGES_SUITES = ("unpack", "tree", "start", "share")
SERVER_SUITES = ("first", "trip", "transfer", "crowd", "restart", "e2b")
RIVALS = ("subprocess", "bwrap", "docker", "runsc")


Names = Callable[[click.Context, click.Parameter, str], tuple[str, ...]]


def names(*known: str) -> Names:
    """Comma-separated names; if ``known`` are given, only those."""

    def parse(context: click.Context, option: click.Parameter, value: str) -> tuple[str, ...]:
        found = tuple(dict.fromkeys(name.strip() for name in value.split(",") if name.strip()))
        for name in found:
            if known and name not in known:
                raise click.BadParameter(f"{name!r} is not one of {', '.join(known)}", context, option)
        return found

    return parse


@click.command()
@click.option("--quick", is_flag=True, help="Fewer rounds: for a look, not for quoting.")
@click.option(
    "--only",
    default="",
    callback=names(),
    metavar="SUITES",
    help=f"Only these suites: {', '.join(SUITES)}; with --live: {', '.join(LIVE_SUITES)}; "
    f"with --net: {', '.join(NET_SUITES)}; with --images: {', '.join(IMAGES_SUITES)}; "
    f"with --server: {', '.join(SERVER_SUITES)}.",
)
@click.option(
    "--engine",
    "engines",
    default="",
    callback=names(),
    metavar="ENGINES",
    help="The engines to measure (container,process; with --net: container,gvisor).",
)
@click.option(
    "--against",
    default=",".join(RIVALS),
    show_default=True,
    callback=names(*RIVALS, "none"),
    metavar="RIVALS",
    help="The rivals to measure alongside; those that are not installed are left out.",
)
@click.option("--with-dockerd", is_flag=True, help="Start a private Docker daemon for the run (root).")
@click.option("--hold", type=click.IntRange(1, 100_000), default=None, help="How many sandboxes to hold at once.")
@click.option("--live", is_flag=True, help="Snapshots, restores, forks, pools, pauses, beside runsc used by hand.")
@click.option("--net", is_flag=True, help="The way out over the wire, beside a bare socket and a bare Python relay.")
@click.option("--images", is_flag=True, help="Unpacking beside tar -x, starts of images, what sandboxes share.")
@click.option("--server", is_flag=True, help="Sandboxes of a server over loopback, beside those held here.")
@click.option(
    "--layer",
    type=click.Path(exists=True, dir_okay=False),
    default=None,
    help="With --images: a tar to unpack; else one is made of this machine's files.",
)
@click.option(
    "--rounds",
    type=click.IntRange(1, 1000),
    default=None,
    help="With --live: how many restores (10); with --net: downloads (5); with --images: unpackings (5); "
    "with --server: starts (40).",
)
@click.option("--plot", type=click.Path(dir_okay=False), default=None, help="With --live: the curves, as an SVG file.")
@click.option("--check", is_flag=True, help="End with exit code 1 if a bar is missed.")
@click.option("--json", "as_json", is_flag=True, help="All numbers, raw, as JSON.")
def bench(
    quick: bool, only: tuple[str, ...], engines: tuple[str, ...], against: tuple[str, ...], with_dockerd: bool,
    hold: int | None, live: bool, net: bool, images: bool, server: bool, layer: str | None, rounds: int | None,
    plot: str | None, check: bool, as_json: bool,
) -> None:  # fmt: skip
    """Measure Sloplet beside a bare subprocess, bwrap, docker and runsc, in one run. See docs/bench.md."""
    from ..testing.bench.bars import judge

    kinds = [kind for kind, asked in (("live", live), ("net", net), ("images", images), ("server", server)) if asked]
    _check_options(only, kinds, rounds=rounds, plot=plot, layer=layer)
    if live:
        report = _run_live(quick, only, rounds)
    elif net:
        report = _run_net(quick, only, engines, rounds)
    elif images:
        report = _run_images(quick, only, rounds, layer)
    elif server:
        report = _run_server(quick, only, engines, rounds)
    else:
        changes: dict[str, Any] = {
            "engines": engines or ("container", "process"), "only": only, "with_dockerd": with_dockerd,
            "against": tuple(name for name in against if name != "none"),
        }  # fmt: skip
        report = _run(quick, changes if hold is None else {**changes, "live": hold})
    if plot is not None:
        _draw(report, plot)
    _show(report, as_json)
    if check and any(verdict.passed is False for verdict in judge(report)):
        raise click.exceptions.Exit(1)


def _check_options(
    only: tuple[str, ...], kinds: list[str], *, rounds: int | None, plot: str | None, layer: str | None
) -> None:
    if len(kinds) > 1:
        raise click.UsageError(f"--{kinds[0]} and --{kinds[1]} are two runs")
    kind = kinds[0] if kinds else ""
    known = {"live": LIVE_SUITES, "net": NET_SUITES, "images": IMAGES_SUITES, "server": SERVER_SUITES}.get(kind, SUITES)
    for name in only:
        if name not in known:
            raise click.BadParameter(f"{name!r} is not one of {', '.join(known)}", param_hint="--only")
    if rounds is not None and not kind:
        raise click.UsageError("--rounds goes with --live, --net, --images or --server")
    if plot is not None and kind != "live":
        raise click.UsageError("--plot goes with --live")
    if layer is not None and kind != "images":
        raise click.UsageError("--layer goes with --images")


def _run(quick: bool, changes: dict[str, Any]) -> Report:
    from ..testing.bench.run import Plan, run
    from ..testing.bench.run import quick as quick_plan

    with _progress() as say:
        return run(quick_plan(**changes) if quick else Plan(**changes), say=say)


def _run_live(quick: bool, only: tuple[str, ...], rounds: int | None) -> Report:
    from ..testing.bench.state.plan import LivePlan, quick_plan
    from ..testing.bench.state.run import run_live

    changes: dict[str, Any] = {"only": only} if rounds is None else {"only": only, "rounds": rounds}
    with _progress() as say:
        return run_live(quick_plan(**changes) if quick else LivePlan(**changes), say=say)


def _run_net(quick: bool, only: tuple[str, ...], engines: tuple[str, ...], rounds: int | None) -> Report:
    from ..testing.bench.net.plan import NetPlan, quick_plan
    from ..testing.bench.net.run import run_net

    changes: dict[str, Any] = {"only": only}
    if engines:
        changes["engines"] = engines
    if rounds is not None:
        changes["rounds"] = rounds
    with _progress() as say:
        return run_net(quick_plan(**changes) if quick else NetPlan(**changes), say=say)


def _run_images(quick: bool, only: tuple[str, ...], rounds: int | None, layer: str | None) -> Report:
    from ..testing.bench.images.plan import ImagesPlan, quick_plan
    from ..testing.bench.images.run import run_images

    changes: dict[str, Any] = {"only": only, "layer": layer or ""}
    if rounds is not None:
        changes["rounds"] = rounds
    with _progress() as say:
        return run_images(quick_plan(**changes) if quick else ImagesPlan(**changes), say=say)


def _run_server(quick: bool, only: tuple[str, ...], engines: tuple[str, ...], rounds: int | None) -> Report:
    from ..testing.bench.server.plan import ServerPlan, quick_plan
    from ..testing.bench.server.run import run_server

    changes: dict[str, Any] = {"only": only}
    if engines:
        changes["engine"] = engines[0]
    if rounds is not None:
        changes["rounds"] = rounds
    with _progress() as say:
        return run_server(quick_plan(**changes) if quick else ServerPlan(**changes), say=say)


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """What is being measured, on stderr."""
    from rich.console import Console

    console = Console(stderr=True)
    with console.status("starting") as status:

        def say(text: str) -> None:
            if console.is_terminal:
                console.log(text, highlight=False)
                status.update(text)
            else:
                click.echo(text, err=True)

        yield say


def _draw(report: Report, path: str) -> None:
    from ..testing.bench.state.plot import draw

    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write(draw(report.to_dict()))
    except OSError as error:
        raise click.ClickException(f"{path} cannot be written: {error.strerror}") from error


def _show(report: Report, as_json: bool) -> None:
    from rich.console import Console

    from ..testing.bench.show import show
    from ..testing.bench.state.table import show_live

    console = Console(width=None if sys.stdout.isatty() else 140)
    if as_json:
        click.echo(json_.dumps(report.to_dict(), indent=1))
    elif report.kind == "live":
        show_live(report, console)
    else:
        show(report, console)
