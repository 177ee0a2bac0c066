"""SSH: ``ssh NAME@host -p 2222`` into a sandbox, by keys that are tied to keys of the server. See docs/ssh.md.

``keys`` are the public keys and the server's own; ``service`` listens, counts, and ends what is revoked; ``visitor`` is
one connection; ``session`` one shell, command or SFTP of it; ``files`` and ``openfile`` are SFTP over the wire;
``forward`` a port inside. Nothing here touches a file or a port of this machine but the host key.
"""
