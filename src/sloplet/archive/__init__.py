"""A whole sandbox as one file: what ``box.export`` writes and ``Sandbox.load`` starts elsewhere. See docs/archive.md.

``layout`` what the file is made of, ``write`` and ``read`` it; ``rootfs`` an image as a tar and ``images`` where it
is found or laid down again; ``hostprint`` what stands for ``image="host"``; ``moving`` what a runtime does with these.
"""
