"""What a sandbox has made of its files: told by the agent, compared with the image, brought to the host.

``read``    the records of CHANGES (docs/wire.md) as entries; every one is taken as hostile
``stored``  the same records in a file, with contents: a disk snapshot
``base``    the image, as the sandbox saw it before anything was written
``state``   entries over a base: what is at a path, now or at a snapshot
``walk``    two states, and where they differ without reading any file (pure)
``made``    what the runtime itself writes into every sandbox: no change of anybody's
``text``    unified diffs, with bounded work
``compare`` all of these together: ``diff_of`` gives the changes of ``Controller.diff``
``choose``  which changes go to the host, and where to (pure)
``apply``   chosen changes, written to a folder of the host; ``target``: its single steps
"""
