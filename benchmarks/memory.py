"""What one person needs of a hub: `make bench`. Linux only, since it reads /proc.

own       memory that no file stands behind: what another person adds
shared    what it has mapped of files, PyTorch's before all: once for all who run from the same image on one machine
peak      the most that it had resident at any moment
"""

import os
import resource
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parent.parent
KB = 1024


def process(pid: int) -> dict[str, float]:
    """Memory of a process, in MB."""
    numbers = {}
    for file in ("smaps_rollup", "status"):
        for line in Path(f"/proc/{pid}/{file}").read_text().splitlines():
            name, _, rest = line.partition(":")
            if rest.endswith("kB"):
                numbers[name] = int(rest.split()[0]) / KB
    own = numbers["Anonymous"]
    return {"own": own, "shared": numbers["Rss"] - own, "resident": numbers["Rss"], "peak": numbers["VmHWM"]}


def processor(pid: int) -> float:
    """Seconds of processor that a process has used, with those of the compilers that it called."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")  # utime, stime, and the children's


def report(name: str, pid: int) -> None:
    memory = process(pid)
    words = "   ".join(f"{what} {memory[what]:4.0f}" for what in ("own", "shared", "resident", "peak"))
    print(f"{name:36} MB: {words}   processor: {processor(pid):.1f} s", flush=True)


def kernels() -> None:
    """The kernel of each notebook, when its last cell has run."""
    os.environ.pop("RAWGRAD_ANSWERS", None)
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        client = NotebookClient(nbformat.read(path, as_version=4), timeout=300, kernel_name="python3")
        with client.setup_kernel():
            for number, cell in enumerate(client.nb.cells):
                client.execute_cell(cell, number)
            report(f"kernel, {path.stem}", client.km.provisioner.process.pid)


def server() -> None:
    """JupyterLab as `make lab` starts it, before anybody opens a page."""
    sys.path.insert(0, str(ROOT / "tests"))
    import tempfile

    import test_browser

    with tempfile.TemporaryDirectory() as folder:
        lab = test_browser.Lab(Path(folder))
        try:
            report("JupyterLab's server", lab.process.pid)
        finally:
            lab.stop()


def starts(rounds: int = 3) -> None:
    """Processor time of `import rawgrad`, and how long the last of several waits who start at once."""
    command = [sys.executable, "-c", "import rawgrad; from rawgrad import exercises, look, scenarios, widgets"]

    def run(_=None) -> float:
        start = time.perf_counter()
        subprocess.run(command, check=True)
        return time.perf_counter() - start

    run()  # the files are read
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    alone = [run() for _ in range(rounds)]
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) / rounds
    print(f"imports: {statistics.median(alone):.1f} s alone, {used:.1f} s of processor, on {os.cpu_count()} processors")
    for people in (2, 8):
        with ThreadPoolExecutor(people) as pool:
            print(f"imports, {people} at once: the last after {max(pool.map(run, range(people))):.1f} s", flush=True)


if __name__ == "__main__":
    kernels()
    server()
    starts()
