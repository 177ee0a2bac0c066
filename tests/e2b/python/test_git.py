"""The client's helpers for git."""

from __future__ import annotations

from e2b import Sandbox


def test_a_repository_and_its_remote(box: Sandbox) -> None:
    git = box.git
    box.commands.run("git init -q --bare --initial-branch main /tmp/remote.git")
    git.init("/tmp/work", initial_branch="main")
    git.configure_user("A Name", "name@example.com")
    box.files.write("/tmp/work/README.md", "hello\n")
    assert git.status("/tmp/work").file_status[0].name == "README.md"
    git.add("/tmp/work")
    git.commit("/tmp/work", "first")
    git.remote_add("/tmp/work", "origin", "/tmp/remote.git")
    git.push("/tmp/work", remote="origin", branch="main", set_upstream=True)
    git.clone("/tmp/remote.git", path="/tmp/clone")
    assert box.files.read("/tmp/clone/README.md") == "hello\n"
    git.create_branch("/tmp/work", "feature")
    assert sorted(git.branches("/tmp/work").branches) == ["feature", "main"]
