"""Reload of a running daemon on SIGHUP."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import fields, replace

from purgatoryd.daemon.config import Config
from purgatoryd.daemon.listeners.sockets import Sockets
from purgatoryd.daemon.log import log
from purgatoryd.daemon.placement import Placement
from purgatoryd.daemon.replay_server import ReplayServer
from purgatoryd.daemon.service_manager import ServiceManager
from purgatoryd.shm_layout.arena import Arena
from purgatoryd.shm_layout.errors import PurgatorydError

RELOADED = (
    "log_level", "quota_timers", "quota_bytes", "quota_ops", "uid_share", "placement", "cpus",
    "node", "realtime", "busy_poll_ns",
)  # fmt: skip
"""Settings that a reload applies; changes of other settings apply from the next start on."""


class Reload:
    """Reads the settings and the tcp keys again. If the settings cannot be read, they stay
    unchanged and the error is logged, but the keys are applied; and vice versa."""

    def __init__(
        self,
        config: Config,
        reread: Callable[[], Config],
        arena: Arena,
        sockets: Sockets,
        placement: Placement,
        service_manager: ServiceManager,
        replay: ReplayServer,
    ) -> None:
        """`reread` reads the settings again and returns them; it may raise."""
        self._config = config
        self._reread = reread
        self._arena = arena
        self._sockets = sockets
        self._placement = placement
        self._service_manager = service_manager
        self._replay = replay

    def __call__(self) -> None:
        """Read the settings and the list of tcp keys, and decide the placement again."""
        self._service_manager.reloading()
        for name, part in (("settings", self._settings), ("keys", self._sockets.read_keys)):
            try:
                part()
            except PurgatorydError as error:
                log.error(f"{error}; the {name} are unchanged")
        self._replay.reread()
        self._placement.again(self._arena, self._config)
        gc.collect()  # the garbage collector is off, and parsing leaves reference cycles
        self._service_manager.ready()

    def _settings(self) -> None:
        found = self._reread()
        self._config = replace(self._config, **{name: getattr(found, name) for name in RELOADED})
        log.level = found.log_level
        self._arena.set_quotas(found.quota_timers, found.quota_bytes, found.quota_ops)
        self._arena.set_uid_share(found.uid_share)
        names = [field.name for field in fields(Config)]
        later = [name for name in names if getattr(found, name) != getattr(self._config, name)]
        log.info("settings reloaded")
        if later:
            log.warning(f"changed settings that apply from the next start on: {', '.join(later)}")
