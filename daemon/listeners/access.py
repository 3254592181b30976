"""Permissions to connect and to administer, by the uid and gid from the kernel."""

from __future__ import annotations

import grp
import os
import pwd
from collections.abc import Iterator
from dataclasses import dataclass

from purgatoryd.daemon.config import Config


@dataclass(frozen=True)
class Access:
    """The uids and gids that may connect, and the uids that may administer. Root and the daemon's
    uid may always do both.

    Members of an allowed Unix group are looked up once, at the start, because a look-up in the
    host's user database may block.
    """

    admins: frozenset[int]
    uids: frozenset[int]
    gids: frozenset[int]
    everybody: bool
    """Anyone who can open the socket may connect."""

    @classmethod
    def of(cls, config: Config) -> Access:
        """Return the permissions that the settings grant."""
        admins = frozenset({0, os.geteuid(), *config.admin_uids})
        members = {uid for gid in config.allow_gids for uid in _members(gid)}
        everybody = not config.allow_uids and not config.allow_gids
        uids = frozenset({*config.allow_uids, *members, *admins})
        return cls(admins, uids, frozenset(config.allow_gids), everybody)

    def may_connect(self, uid: int, gid: int) -> bool:
        """True if messages of this uid, with this primary group, are served."""
        return self.everybody or uid in self.uids or gid in self.gids

    def may_administer(self, uid: int) -> bool:
        """True if admin commands of this uid are served."""
        return uid in self.admins


def _members(gid: int) -> Iterator[int]:
    try:
        names = grp.getgrgid(gid).gr_mem
    except KeyError:
        return  # a Unix group without a name has no listed members
    for name in names:
        try:
            yield pwd.getpwnam(name).pw_uid
        except KeyError:
            continue
