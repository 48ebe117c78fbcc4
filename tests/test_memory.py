"""How much memory a process may take, by the files of the system that limit it."""

from __future__ import annotations

import pytest

from foretell._memory import available_memory

GROUPS = {
    "version 2, in a container": ("0::/", "sys/fs/cgroup", "memory.max", "memory.current", ""),
    "version 2": ("0::/a/b", "sys/fs/cgroup/a", "memory.max", "memory.current", ""),
    "version 1": (
        "9:pids:/x\n4:memory:/a/b",
        "sys/fs/cgroup/memory/a/b",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        "total_",
    ),
    "version 1, the host's path": (
        "4:cpu,memory:/a/b",
        "sys/fs/cgroup/memory",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        "total_",
    ),
}


@pytest.mark.parametrize("kind", GROUPS)
def test_the_limit_of_a_container_bounds_the_memory(kind, tmp_path) -> None:
    line, folder, limit, usage, prefix = GROUPS[kind]
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(line + "\n")
    (tmp_path / folder).mkdir(parents=True)
    machine = available_memory(tmp_path)
    assert machine > 2_000_000
    (tmp_path / folder / limit).write_text("5000000\n")
    (tmp_path / folder / usage).write_text("4000000\n")
    stat = f"{prefix}inactive_file 600000\n{prefix}active_file 400000\nother 7\n"
    (tmp_path / folder / "memory.stat").write_text(stat)
    assert available_memory(tmp_path) == 2_000_000
    (tmp_path / folder / usage).write_text("7000000\n")
    assert available_memory(tmp_path) == 0
    (tmp_path / folder / limit).write_text("max\n")
    assert available_memory(tmp_path) > 2_000_000
