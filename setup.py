"""Builds shardopt._C: CPU kernels always, CUDA kernels where a GPU is, or on demand.

Environment:
    SHARDOPT_CUDA: 1 demands the CUDA kernels, 0 leaves them out. Default: built when nvidia-smi lists a GPU and nvcc is
        found; otherwise the build says that they are left out, and how to get them.
    SHARDOPT_CUDA_ARCHS: compute capabilities, such as "80;90;100", or "all": 75, 80, 90, 100, 110 and 120, as far as
        nvcc knows them. The first from 80 on and the last are also kept as PTX. "90-virtual" is PTX alone, which the
        driver compiles when it loads it: a third of the time to build. Default: those of the GPUs of this machine, all
        where it has none.
    CUDA_HOME: the CUDA toolkit, where it is not that of the nvcc on PATH.
    SHARDOPT_REPOSITORY: the project's address, such as https://github.com/OWNER/NAME, to link to.
        Default: no links.
    SHARDOPT_KERNEL_OBJECTS: a folder that keeps objects, those of kernels for every Python. Objects found there are
        linked without another look: only for builds of the same sources with the same settings, as in launch/wheel.sh.
"""

import contextlib
import glob
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent
ALL_CUDA_ARCHS = ("75", "80", "90", "100", "110", "120")  # 80 also serves 86 and 89, 100 also 103, 120 also 121
EXACT = ["-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]
AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mprefer-vector-width=512"]
X86 = {
    "cpu_avx2.cpp": ["-mavx2", "-mfma"],
    "cpu_avx512.cpp": AVX512,
    "cpu_avx512vbmi.cpp": [*AVX512, "-mavx512vbmi"],
}
ARM = {"cpu_neon.cpp": []}
#: Flags of the sources that only processors of this kind run.
TARGET_FLAGS = {"x86_64": X86, "amd64": X86, "aarch64": ARM, "arm64": ARM}.get(platform.machine().lower(), {})


CPU_SECONDS = 115  # of one core, to compile the CPU's sources on x86-64

CUDA_SOURCES = (
    "csrc/step/cuda.cu",
    "csrc/step/cuda_rules.cu",
    "csrc/step/cuda_sum_rules.cu",
    "csrc/norm/cuda.cu",
)


def cpu_sources() -> list[str]:
    """The kernels of steps, which take longest to compile, come first: so all processes have work to the end."""
    step = ["cpu_portable.cpp", *TARGET_FLAGS]
    others = [name for name in step if name != "cpu_avx512vbmi.cpp"]  # such processors run the kernels of avx512
    names = [f"csrc/step/{name}" for name in step]
    names += [
        "csrc/bindings.cpp",
        "csrc/inputs.cpp",
        "csrc/torch_tensor.cpp",
        "csrc/norm/cpu.cpp",
        "csrc/step/cpu.cpp",
        "csrc/threads/pool.cpp",
    ]
    if toolkit:
        names += ["csrc/bindings_cuda.cpp", "csrc/step/cuda_tasks.cpp"]
    return names + [f"csrc/norm/{name}" for name in others]


def pybind11_headers() -> str:
    """The folder of pybind11's headers: of its own package, or of the copy that comes with PyTorch."""
    for package in ("pybind11", "torch"):
        spec = importlib.util.find_spec(package)
        for folder in (spec.submodule_search_locations or []) if spec else []:
            if (Path(folder) / "include/pybind11/pybind11.h").exists():
                return str(Path(folder) / "include")
    sys.exit("pybind11's headers were not found; pip install pybind11")


def nvidia_smi(*options: str) -> str:
    """The output of nvidia-smi; empty where it fails, as it does without a GPU."""
    try:
        done = subprocess.run(["nvidia-smi", *options], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return "" if done.returncode else done.stdout


def archs_of_this_machine() -> list[str]:
    """The compute capabilities of the GPUs that nvidia-smi lists, in rising order; empty without."""
    found = re.findall(r"^(\d+)\.(\d)$", nvidia_smi("--query-gpu=compute_cap", "--format=csv,noheader"), re.MULTILINE)
    return sorted({major + minor for major, minor in found}, key=int)


def say(line: str) -> None:
    """Prints a line, also on the terminal itself: pip without -v hides the output of a build that succeeds."""
    print(line, flush=True)
    if not sys.stdout.isatty():
        with contextlib.suppress(OSError), open("/dev/tty", "w") as terminal:
            terminal.write(f"\n{line}\n")


def announcement(cpu_files: int, archs: list[str], cores: int) -> str:
    """The line that the build prints before it compiles: files, kinds of processors, and how long that takes."""
    minutes = max(1, round(CPU_SECONDS / 60 / cores))
    line = f"shardopt: compiling {cpu_files} files for {platform.machine()}, about {minutes} min on {cores} cores"
    cuda = f"; and {len(CUDA_SOURCES)} of CUDA for compute capability {', '.join(archs)}, which takes longer"
    return line + (cuda if archs else "")


class CudaToolkit:
    """The toolkit whose nvcc builds the CUDA kernels."""

    def __init__(self, nvcc: str, home: Path, cudart: Path) -> None:
        self.nvcc = nvcc
        self.home = home
        self.cudart = cudart

    @classmethod
    def find(cls) -> "tuple[CudaToolkit | None, str]":
        """Returns the toolkit to build with, or None; and why the default is None, empty where the user chose it."""
        wanted = os.environ.get("SHARDOPT_CUDA")
        if wanted not in (None, "0", "1"):
            sys.exit(f"SHARDOPT_CUDA: got {wanted!r}, expected 0 or 1")
        if wanted == "0":
            return None, ""
        if wanted is None and not nvidia_smi("-L").startswith("GPU "):
            return None, "nvidia-smi lists no GPU"
        toolkit, problem = cls._search()
        if toolkit is None and wanted == "1":
            sys.exit(f"SHARDOPT_CUDA=1, but {problem}; set CUDA_HOME or put nvcc on PATH, or SHARDOPT_CUDA=0")
        return toolkit, problem

    @classmethod
    def _search(cls) -> "tuple[CudaToolkit | None, str]":
        home = os.environ.get("CUDA_HOME")
        nvcc = shutil.which("nvcc", path=f"{home}/bin" if home else None)
        if nvcc is None:
            return None, "no nvcc was found"
        # nvcc may be a wrapper script: only the compiler driver itself knows where it lives.
        dry_run = subprocess.run([nvcc, "-dryrun", "x.cu"], capture_output=True, text=True)
        top = re.search(r"^#\$ TOP=(.*)$", dry_run.stderr, re.MULTILINE)
        root = Path(top.group(1) if top else Path(nvcc).parent.parent).resolve()
        for folder in ("lib64", "lib", "targets/*/lib"):
            for library in glob.glob(str(root / folder / "libcudart_static.a")):
                return cls(nvcc, root, Path(library)), ""
        return None, f"{root} has no libcudart_static.a"

    def archs(self) -> list[str]:
        """The compute capabilities to compile for, in rising order."""
        wanted = os.environ.get("SHARDOPT_CUDA_ARCHS", "").strip()
        if wanted not in ("", "all"):
            return re.split(r"[;, ]+", wanted)
        if own := [] if wanted else archs_of_this_machine():
            return own
        listed = subprocess.run([self.nvcc, "--list-gpu-arch"], capture_output=True, text=True)
        known = set(re.findall(r"compute_(\d+)", listed.stdout))
        return [arch for arch in ALL_CUDA_ARCHS if arch in known or not known]

    def warn_of_another_major(self) -> None:
        """Says so where PyTorch, as far as it can be seen from here, is made for another major version of CUDA."""
        if importlib.util.find_spec("torch") is None:
            return
        import torch

        listed = subprocess.run([self.nvcc, "--version"], capture_output=True, text=True)
        release = re.search(r"release (\d+)", listed.stdout)
        if torch.version.cuda and release and torch.version.cuda.split(".")[0] != release[1]:
            print(
                f"warning: {self.nvcc} is of CUDA {release[1]}, PyTorch of CUDA {torch.version.cuda}: a driver that is "
                "too old for the former finds no device; set CUDA_HOME to a toolkit of PyTorch's version",
                file=sys.stderr,
            )

    def compile(self, source: str, target: Path, include: str) -> None:
        wanted = self.archs()
        if unknown := [arch for arch in wanted if not re.fullmatch(r"\d+(-virtual)?", arch)]:
            sys.exit(f"SHARDOPT_CUDA_ARCHS: got {unknown[0]!r}, expected numbers such as 90 or 90-virtual")
        archs = sorted({arch.removesuffix("-virtual") for arch in wanted}, key=int)
        codes = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in archs if a in wanted]
        kept = {next((a for a in archs if int(a) >= 80), archs[-1]), archs[-1], *(set(archs) - set(wanted))}
        codes += [f"-gencode=arch=compute_{a},code=compute_{a}" for a in sorted(kept, key=int)]
        target.parent.mkdir(parents=True, exist_ok=True)
        command = [
            self.nvcc,
            "-std=c++17",
            "-O3",
            "--fmad=false",
            "-Xcompiler=-fPIC",
            "-I",
            include,
        ]
        command += [*codes, "--threads=0", "-c", source, "-o", str(target)]
        subprocess.run(command, check=True)


class BuildExtension(build_ext):
    """Compiles each source with the flags of its instruction set."""

    def build_extension(self, ext: Extension) -> None:
        include = str(ROOT / "csrc")
        kernel_objects = os.environ.get("SHARDOPT_KERNEL_OBJECTS", self.build_temp)

        def compile_cpu(source: str) -> list[str]:
            is_kernel = len(Path(source).parts) > 2  # in a folder of csrc, where no file includes Python's headers
            keeps = kernel_objects != self.build_temp
            folder = kernel_objects if is_kernel or not keeps else f"{kernel_objects}/{sys.implementation.cache_tag}"
            (name,) = self.compiler.object_filenames([source], output_dir=folder)
            if keeps and Path(name).exists():
                return [name]
            return self.compiler.compile(
                [source],
                output_dir=folder,
                include_dirs=[include, *ext.include_dirs],
                macros=ext.define_macros,
                extra_postargs=[*ext.extra_compile_args, *EXACT, *TARGET_FLAGS.get(Path(source).name, [])],
            )

        def compile_cuda(source: str) -> list[str]:
            assert toolkit is not None
            cuda_object = Path(kernel_objects) / source.replace(".cu", ".cu.o")
            if kernel_objects == self.build_temp or not cuda_object.exists():
                toolkit.compile(source, cuda_object, include)
            return [str(cuda_object)]

        if toolkit is not None:
            toolkit.warn_of_another_major()
        elif left_out:
            say(
                f"shardopt: the CUDA kernels are left out, as {left_out}; to get them, put nvcc on PATH and run "
                "SHARDOPT_CUDA=1 pip install ."
            )
        say(announcement(len(cpu_sources()), toolkit.archs() if toolkit else [], os.cpu_count() or 1))
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            compiled = [pool.submit(compile_cuda, source) for source in (CUDA_SOURCES if toolkit else [])]
            compiled += [pool.submit(compile_cpu, source) for source in cpu_sources()]
            objects = [name for each in compiled for name in each.result()]
        objects += [str(toolkit.cudart)] if toolkit else []
        libraries = ["pthread", "dl", "rt"] if toolkit else ["pthread", "dl"]
        self.compiler.link_shared_object(
            objects,
            self.get_ext_fullpath(ext.name),
            libraries=libraries,
            extra_postargs=ext.extra_link_args,
            build_temp=self.build_temp,
            target_lang="c++",
        )


toolkit, left_out = CudaToolkit.find()
extension = Extension(
    "shardopt._C",
    [],
    include_dirs=[pybind11_headers()],
    extra_compile_args=["-std=c++17", "-fvisibility=hidden", "-O3", "-g0"],
    define_macros=[("SHARDOPT_WITH_CUDA", "1")] if toolkit else [],
)
repository = os.environ.get("SHARDOPT_REPOSITORY")
setup(
    project_urls={"Source": repository, "Issues": f"{repository}/issues"} if repository else {},
    ext_modules=[extension],
    cmdclass={"build_ext": BuildExtension},
)
