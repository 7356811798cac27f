"""Several hosts, and ranks that die under `torchrun`."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

SCRIPT = Path(__file__).with_name("train_script.py")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


def environment(**more):
    path = os.pathsep.join(path for path in sys.path if path)
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **more}


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """Losses of one process."""
    spec = importlib.util.spec_from_file_location("train_script", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script.train(tmp_path_factory.mktemp("one"))


def run(*command):
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.fixture
def hosts():
    """Two network namespaces, joined by a cable and nothing else: names, and addresses in them."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("needs root and the command ip, to make network namespaces")
    tag = uuid.uuid4().hex[:6]
    names, links, addresses = [f"mz{tag}a", f"mz{tag}b"], [f"v{tag}a", f"v{tag}b"], ["10.211.7.1", "10.211.7.2"]
    try:
        made = run("ip", "netns", "add", names[0])
        if made.returncode:
            pytest.skip(f"network namespaces can't be made here: {made.stderr.strip()}")
        steps = [["ip", "netns", "add", names[1]], ["ip", "link", "add", links[0], "type", "veth", "peer", links[1]]]
        for name, link, address in zip(names, links, addresses, strict=True):
            inside = ["ip", "-n", name]
            steps += [
                ["ip", "link", "set", link, "netns", name],
                [*inside, "addr", "add", f"{address}/24", "dev", link],
                [*inside, "link", "set", link, "up"],
                [*inside, "link", "set", "lo", "up"],
            ]
        for step in steps:
            done = run(*step)
            if done.returncode:
                pytest.skip(f"{' '.join(step)} failed: {done.stderr.strip()}")
        yield list(zip(names, links, addresses, strict=True))
    finally:
        for name in names:
            run("ip", "netns", "del", name)


def test_two_hosts_shard_inside_and_replicate_across(hosts, expected, tmp_path):
    first = hosts[0][2]
    processes = []
    for node, (name, link, address) in enumerate(hosts):
        command = ["ip", "netns", "exec", name, *TORCHRUN, "--nnodes=2", "--nproc-per-node=2", f"--node-rank={node}"]
        command += [f"--master-addr={first}", "--master-port=29511", f"--local-addr={address}"]
        command += [str(SCRIPT), str(tmp_path), "--hosts", "2"]
        processes.append(
            subprocess.Popen(
                command,
                env=environment(GLOO_SOCKET_IFNAME=link),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    try:
        outputs = [process.communicate(timeout=200)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(outputs)
    losses = json.loads((tmp_path / "losses.json").read_text())
    assert losses == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("where", ["forward", "backward", "save"])
def test_torchrun_restarts_from_the_last_checkpoint_after_a_rank_was_killed(where, expected, tmp_path):
    command = [*TORCHRUN, "--standalone", "--nproc-per-node=2", "--max-restarts=1", "--monitor-interval=0.2"]
    done = subprocess.run(
        [*command, str(SCRIPT), str(tmp_path), "--die", where],
        # By default torchrun keeps the store of the first try, and the ranks of the second look for the addresses of
        # dead ones in it: https://github.com/pytorch/pytorch/issues/135712
        env=environment(TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1"),
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "died").exists()
    losses = json.loads((tmp_path / "losses.json").read_text())
    assert losses == pytest.approx(expected, rel=1e-5)
