"""Programs in processes of their own that need not import torch first: they are forked from one that has.

In each program that loads a model, importing torch, its compiler and the imports of transformers takes up to 7 s of a
core. All else is the program's own: environment, folder, modules, output.
"""

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import types
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]

# The imports may initialise CUDA, which a forked process cannot use.
_context = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "forkserver")
_context.set_forkserver_preload(["torch._inductor.compile_fx", "scipy.optimize", "torchao.quantization"])


def run(
    program: str | Path,
    *arguments: str,
    cwd: str | Path = ROOT,
    env: dict[str, str] | None = None,
    before: str = "",
    timeout: float = 300,
) -> subprocess.CompletedProcess:
    """Runs code, or the script at a path, and returns its exit status and output.

    env: the whole environment, by default that of this process. torch has read its own variables before it is set.
    before: code to run first, like a sitecustomize.
    """
    env = dict(os.environ if env is None else env)
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, name) for name in ("stdout", "stderr")]
        process = _context.Process(target=_run, args=(program, arguments, cwd, env, before, files))
        process.start()
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            raise subprocess.TimeoutExpired(str(program), timeout)
        return subprocess.CompletedProcess(program, process.exitcode, *(file.read_text() for file in files))


def _is_of_pytest(path: Path) -> bool:
    """True for the folders of the tests and their tools, which pytest.ini adds to the path."""
    return path == ROOT / "tools" or path.is_relative_to(ROOT / "tests")


def _run(program, arguments, cwd, env, before, files) -> None:
    for number, file in enumerate(files, 1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), number)
    multiprocessing.set_start_method(None, force=True)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    first = os.path.dirname(program) if isinstance(program, Path) else ""
    given = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [first, *given, *(path for path in sys.path if path and not _is_of_pytest(Path(path)))]
    sys.argv = [str(program) if isinstance(program, Path) else "-c", *map(str, arguments)]
    exec(before, {})
    if isinstance(program, Path):
        runpy.run_path(str(program), run_name="__main__")
    else:
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(program, "<string>", "exec"), vars(main))
