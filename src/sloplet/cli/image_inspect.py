"""``sloplet image inspect``: everything known about an image."""

from __future__ import annotations

import time

import click

from .options import Verb, image_names, json_option
from .output import age, print_json, print_table, size
from .stores import images


@click.command("inspect", cls=Verb, examples="sloplet image inspect debian:12\nsloplet image inspect 3f2a9c --json")
@click.argument("image", metavar="IMAGE", shell_complete=image_names)
@json_option
def command(image: str, as_json: bool) -> None:
    """Everything known about an image: its names, what it runs, its layers, and what it takes on this disk."""
    from ..images.reference import parse

    with images() as known:
        looked = known.look(image)
    found = looked.image
    if as_json:
        print_json({**found.to_dict(), "disk": {"blobs": found.size, "unpacked": looked.unpacked}})
        return
    config = found.config
    facts = [
        ("id", found.id),
        ("manifest", found.manifest),
        ("names", ", ".join(parse(each).familiar for each in found.references) or "-"),
        ("platform", found.platform),
        ("made", config.created or "-"),
        ("came", f"{age(found.created_at)} ago ({time.strftime('%Y-%m-%d %H:%M', time.localtime(found.created_at))})"),
        ("used", f"{age(found.used_at)} ago"),
        ("entrypoint", " ".join(config.entrypoint) or "-"),
        ("command", " ".join(config.cmd) or "-"),
        ("user", config.user or "root"),
        ("workdir", config.workdir or "/"),
        ("ports", ", ".join(config.ports) or "-"),
        ("volumes", ", ".join(config.volumes) or "-"),
        *(("env", f"{name}={value}") for name, value in config.env),
        *(("label", f"{name}={value}") for name, value in config.labels),
        ("size", size(found.size)),
        ("unpacked", size(looked.unpacked)),
    ]
    print_table(["WHAT", "VALUE"], facts)
    click.echo()
    rows = [
        (layer.digest.removeprefix("sha256:")[:12], layer.packing, size(layer.size), size(looked.layers.get(diff)))
        for layer, diff in zip(found.layers, config.diff_ids, strict=True)
    ]
    print_table(["LAYER", "PACKED", "SIZE", "UNPACKED"], rows)
