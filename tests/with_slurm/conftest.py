"""A SLURM of one node on this machine, with files of its own, that is stopped with the tests."""

import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "srun")
# Debian has the daemons where only root looks.
PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"
MISSING = [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]

CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
# How long a requeued job waits before it is started again, too; less than 5 is taken for 120.
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
# The node has the CPUs that are written here, whatever the machine has.
SlurmdParameters=config_overrides
SlurmdTimeout=0
MessageTimeout=100
JobRequeue=1
KillWait=30
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=1,sched_min_interval=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
NodeName={host} NodeAddr=127.0.0.1 CPUs=4 State=UNKNOWN
PartitionName=low Nodes=ALL Default=YES State=UP PriorityTier=1 GraceTime=300
PartitionName=high Nodes=ALL State=UP PriorityTier=2
"""


def pytest_collection_modifyitems(items):
    for item in items:
        if "with_slurm" in item.path.parts:
            # Each job loads torch anew, and some are started twice.
            item.add_marker(pytest.mark.timeout(1200))
            if MISSING or os.geteuid():
                why = f"{', '.join(MISSING)} not found: apt-get install slurm-wlm munge"
                item.add_marker(pytest.mark.skip(reason=why if MISSING else "needs root"))


def free_ports(count):
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def wait_until(condition, what, seconds=600, every=0.2):
    """Polls; returns what the condition found."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, f"{what} did not happen within {seconds} s"
        time.sleep(every)
    return found


class Slurm:
    """The commands of SLURM, spoken to the one of the tests."""

    def __init__(self, environment):
        self.environment = environment

    def __call__(self, *command):
        done = subprocess.run(
            command, env=self.environment, cwd=ROOT, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def submit(self, *arguments):
        """Submits; the job's number."""
        return re.search(r"\d+", self("sbatch", *arguments))[0]

    def state(self, job):
        """The state of a job or a task; None once SLURM has forgotten it."""
        shown = subprocess.run(
            ["scontrol", "show", "job", "--oneliner", job],
            env=self.environment,
            capture_output=True,
            text=True,
        ).stdout
        found = re.search(r"JobState=(\w+)", shown)
        return found and found[1]

    def finish(self, job):
        """Waits for the end of a job or a task; its last state."""
        ends = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        return wait_until(lambda: (s := self.state(job)) in ends and s, f"the end of job {job}")


@pytest.fixture(scope="session")
def slurm():
    # A short path: sockets have no room for a long one.
    folder = Path(tempfile.mkdtemp(prefix="slurm_", dir="/tmp"))
    for name in ("state", "spool"):
        (folder / name).mkdir()
    key = folder / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(os.urandom(1024))
    host = socket.gethostname().partition(".")[0]
    config = folder / "slurm.conf"
    config.write_text(CONFIG.format(host=host, ports=free_ports(2), folder=folder))
    environment = os.environ | {
        "PATH": PATH,
        "SLURM_CONF": str(config),
        "PYTHON": sys.executable,
        "PYTHONPATH": f"{Path(__file__).parent}:{ROOT / 'tests'}:{ROOT / 'src'}",
    }
    files = {"socket": "socket", "seed-file": "seed", "log-file": "log", "pid-file": "pid"}
    munge = [f"--{option}={folder}/munge.{name}" for option, name in files.items()]
    daemons = [
        ["munged", "--foreground", "--force", f"--key-file={key}", *munge],
        ["slurmctld", "-D", "-f", str(config)],
        ["slurmd", "-D", "-f", str(config), "-N", host],
    ]
    running = []
    try:
        for daemon in daemons:
            log = (folder / f"{daemon[0]}.out").open("w")
            running.append(
                subprocess.Popen(daemon, env=environment, stdout=log, stderr=log, text=True)
            )
            if daemon[0] == "munged":
                wait_until((folder / "munge.socket").exists, "munged's start", 30)
        commands = Slurm(environment)

        def idle():
            shown = subprocess.run(
                ["sinfo", "-h", "-o", "%T"], env=environment, capture_output=True, text=True
            )
            return "idle" in shown.stdout

        wait_until(idle, f"SLURM's start (see {folder})", 60)
        yield commands
        commands("scancel", "--user=root")
        wait_until(lambda: not commands("squeue", "-h"), "the end of all jobs", 60)
    finally:
        for process in reversed(running):
            process.terminate()
            process.wait(timeout=60)
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def overrides(random_model):
    """Settings of a tiny run: a random model, four steps."""
    return [
        "experiment=gdgrpo_spatial",
        f"model.path={random_model}",
        "steps=4",
        "prompts_per_step=2",
        "rollouts_per_prompt=4",
        "evaluation.every=0",
        "evaluate=false",
    ]


@pytest.fixture(scope="session", name="wait_until")
def waiting():
    return wait_until
