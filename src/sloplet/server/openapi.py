"""The OpenAPI document without a running server: ``python -m sloplet.server.openapi``.

docs/openapi.json is a copy of it, which the clients' types are made of; scripts/openapi writes both anew, and tests
fail when either is stale.
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any, cast

from fastapi import FastAPI

from .app import make_api
from .settings import ServeSettings
from .state import ServerState


def api() -> FastAPI:
    """The routes, to be looked at: none can be called, there is no state and no home. /mcp is not one of them."""
    return make_api(cast(ServerState, SimpleNamespace(settings=ServeSettings(mcp=False))))


def document() -> dict[str, Any]:
    """What /openapi.json answers."""
    return api().openapi()


if __name__ == "__main__":
    json.dump(document(), sys.stdout, indent=1, sort_keys=True)
    print()
