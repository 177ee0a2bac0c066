"""What a cloud-config asks for, as plain values: what ``config`` makes and ``apply`` carries out."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Command:
    """An item of runcmd or bootcmd, as a line of a shell script."""

    line: int
    script: str


@dataclass(frozen=True)
class File:
    """An item of write_files."""

    line: int
    path: str
    content: bytes
    mode: int = 0o644
    owner: str = "root:root"
    append: bool = False


@dataclass(frozen=True)
class Group:
    name: str
    members: tuple[str, ...] = ()


@dataclass(frozen=True)
class User:
    """An item of users. Of one that is there already only groups, keys, password and sudo are changed."""

    line: int
    name: str
    uid: int | None = None
    gecos: str = ""
    home: str | None = None  #: None: /home/NAME
    shell: str | None = None  #: None: /bin/bash, or /bin/sh where there is none
    primary_group: str | None = None  #: None: one of its own name
    groups: tuple[str, ...] = ()
    system: bool = False
    create_home: bool = True
    password: str | None = None  #: a hash
    locked: bool = True
    sudo: tuple[str, ...] = ()  #: rules, without the name
    keys: tuple[str, ...] = ()


@dataclass(frozen=True)
class Packages:
    line: int
    names: tuple[str, ...] = ()  #: NAME or NAME=VERSION
    update: bool = False
    upgrade: bool = False


@dataclass(frozen=True)
class Plan:
    """A whole cloud-config, in the order in which it is applied."""

    bootcmd: tuple[Command, ...] = ()
    files: tuple[File, ...] = ()
    groups: tuple[Group, ...] = ()
    users: tuple[User, ...] = ()
    default_keys: tuple[str, ...] = ()  #: ssh_authorized_keys of the sandbox's own user
    timezone: tuple[int, str] | None = None
    locale: str | None = None
    env: dict[str, str] = field(default_factory=dict)
    packages: Packages | None = None
    deferred: tuple[File, ...] = ()
    runcmd: tuple[Command, ...] = ()
    hostname: str | None = None
    message: str | None = None
