"""From a spec to the body of ``POST /v1/sandboxes``: what ``SandboxSpec.make`` would be given to make it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import SpecError
from ..headerspec import with_values
from ..netspec import NetworkSpec
from ..spec import SandboxSpec

_LIMITS = ("cpus", "memory", "disk", "pids", "open_files")
_AS_THEY_ARE = (
    "name", "image", "engine", "at_least", "ttl", "on_ttl", "workdir", "user", "sudo", "hostname", "allow_weaker",
    "template", "idle", "undo", "checkpoint_every", "pool",
)  # fmt: skip
#: Of a network: what older servers do not know, who refuse what they do not know, by what leaves it out.
_NEWER = {"by_address": False, "headers": {}, "proxy": ""}


def network_arguments(network: NetworkSpec, values: Mapping[str, str | None] | None = None) -> dict[str, Any]:
    """``values``: of its headers and its proxy. None: none of them."""
    body = network.to_dict()
    if values is not None:
        body |= with_values(network.headers, network.proxy, values)
    return {name: value for name, value in body.items() if name not in _NEWER or value != _NEWER[name]}


def spec_arguments(spec: SandboxSpec) -> dict[str, Any]:
    """The server makes an equal spec of it. What is as by default is left out."""
    default = SandboxSpec()
    body: dict[str, Any] = {
        name: getattr(spec, name) for name in _AS_THEY_ARE if getattr(spec, name) != getattr(default, name)
    }
    body |= {name: getattr(spec.limits, name) for name in _LIMITS if name in spec.limits.explicit}
    if spec.no_network:
        body["network"] = "none"
    elif spec.network.mode != "none":
        body["network"] = network_arguments(spec.network)
    if spec.env:
        body["env"] = dict(spec.env)
    if spec.labels:
        body["labels"] = dict(spec.labels)
    if spec.secrets:
        body["secrets"] = {
            secret.name: {"hosts": list(secret.hosts), "where": list(secret.where), "placeholder": secret.placeholder}
            for secret in spec.secrets
        }
    if spec.ports:
        body["ports"] = {str(port.inside): port.outside for port in spec.ports}
    if spec.links:
        body["links"] = {link.name: f"{link.ref}:{link.port}" if link.port else link.ref for link in spec.links}
    if spec.volumes:
        body["volumes"] = {
            volume.path: {"source": volume.source, "mode": volume.mode, "shared": volume.shared}
            for volume in spec.volumes
        }
    if spec.cloud_init is not None:
        if not spec.cloud_init.text:
            raise SpecError("the cloud-init file of this sandbox was applied, and is not known any more")
        body["cloud_init"] = spec.cloud_init.text
    return body
