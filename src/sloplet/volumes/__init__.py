"""Volumes: data that outlives sandboxes. docs/volumes.md.

``store``     named volumes: made, listed, copied and removed; ``records``: what is known of one
``leases``    who has a volume now: locks that the kernel lets go of when the last process of a sandbox is gone
``opening``   what a sandbox asked for, opened and ready to be mounted
``sized``     volumes of a limited size: a filesystem in a file (root)
``trees``     copies of folders whose content is hostile, by descriptors
``copies``    folders as they were when they were copied into a sandbox: what ``diff`` compares with
"""
