"""Programs that try to leave the sandbox; each prints BREACH if it gets through.

The host holds a secret in its environment, a descriptor, its arguments and ``{file}``, and has a
server at ``{port}`` and at the abstract Unix socket ``{name}``; its process is ``{pid}``.
"""

import platform

CANARY = "canary-7f3a9c"

_FIND = """
import os
def look(paths, canary):
    for path in paths:
        try:
            file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            content = os.read(file, 1 << 20)
        except OSError:
            continue
        if canary in content:
            print("BREACH", path)
canary = bytes.fromhex({hexed!r})
"""
_PROCESSES = (
    "[f'/proc/{p}/%s' for p in os.listdir('/proc') if p.isdigit() and int(p) != os.getpid()]"
)

READING = {
    "environment": f"{_FIND}look({_PROCESSES % 'environ'}, canary)",
    "own environment": f"{_FIND}\nif canary.decode() in str(os.environ): print('BREACH')",
    "arguments": f"{_FIND}look({_PROCESSES % 'cmdline'}, canary)",
    "descriptors": f"{_FIND}look(['/proc/self/fd/%d' % n for n in range(200)], canary)",
    "files": f"{_FIND}look([{{file!r}}], canary)",
    "passwords": "open('/etc/passwd').read(); print('BREACH')",
}

_UNNAMED = "import os; os.open({0!r}, os.O_TMPFILE | os.O_WRONLY); print('BREACH')"
WRITING = {
    "core_pattern": "open('/proc/sys/kernel/core_pattern', 'r+').close(); print('BREACH')",
    "home": "open({file!r}, 'a').close(); print('BREACH')",
    "usr": _UNNAMED.format("/usr/bin"),
    "root": _UNNAMED.format("/"),
    "dev": _UNNAMED.format("/dev"),
    "control groups": """
import os
for folder, names, files in os.walk('/sys/fs/cgroup'):
    if os.access(folder, os.W_OK): print('BREACH')
""",
    "shared memory without a limit": """
import os
with open('/dev/shm/breach', 'wb') as file:
    os.unlink(file.name)
    for _ in range(24): file.write(bytes(1 << 20))
print('BREACH')
""",
    "files without a limit": """
import os
files = [open(f'/tmp/breach{number}', 'wb') for number in range(10)]
for file in files:
    os.unlink(file.name)
    for _ in range(8): file.write(bytes(1 << 20))
    file.flush()
print('BREACH')
""",
}

REACHING = {
    "network": """
import socket
socket.create_connection(('127.0.0.1', {port}), timeout=2)
print('BREACH')
""",
    "abstract Unix socket": """
import socket
socket.socket(socket.AF_UNIX).connect({name!r})
print('BREACH')
""",
    "signals": """
import os
os.kill({pid}, 0)
print('BREACH')
""",
}

_CALL = """
import ctypes, errno
libc = ctypes.CDLL(None, use_errno=True)
ctypes.set_errno(0)
result = libc.syscall({number}, *{arguments})
code = ctypes.get_errno()
if result >= 0 or code not in (errno.EPERM, errno.ENOSYS, errno.EAFNOSUPPORT): print('BREACH', code)
"""
_NEWUSER, _SIGCHLD = 0x10000000, 17
_IS_X86 = platform.machine() == "x86_64"
# Bad arguments where right ones would change the machine: the kernel that looks at them answers
# EFAULT or EINVAL.
_CALLS = {
    "bpf": (321, 280, (0, 0, 0)),
    "ptrace": (101, 117, (0, 0, 0, 0)),
    "unshare user": (272, 97, (_NEWUSER,)),
    "mount": (165, 40, (0, 0, 0, 0, 0)),
    "io_setup": (206, 0, (1, 0)),
    "memfd_create": (319, 279, (b"breach", 0)),
    "socket netlink": (41, 198, (16, 3, 0)),
    "socket inet": (41, 198, (2, 1, 0)),
}
"""Some of the calls that ``test_seccomp`` knows, by their numbers on both machines."""
SYSTEM_CALLS = {
    name: _CALL.replace("{number}", str(x86 if _IS_X86 else arm)).replace(
        "{arguments}", repr(arguments)
    )
    for name, (x86, arm, arguments) in _CALLS.items()
}
SYSTEM_CALLS["clone user"] = f"""
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
pid = libc.syscall({56 if _IS_X86 else 220}, {_NEWUSER | _SIGCHLD}, 0, 0, 0, 0)
if pid == 0: os._exit(0)
if pid > 0: print('BREACH')
"""

PROBES = READING | WRITING | REACHING | SYSTEM_CALLS

LIMITS = {
    "endless loop": ("while True: pass", {"timeout"}),
    "ignored signals": (
        "import signal, time\n"
        "for number in range(1, 65):\n"
        "    try: signal.signal(number, signal.SIG_IGN)\n"
        "    except (OSError, ValueError): pass\n"
        "while True: time.sleep(1)",
        {"timeout"},
    ),
    "sleep without output": (
        "import os, time\nos.close(1); os.close(2)\ntime.sleep(99)",
        {"timeout"},
    ),
    "fork bomb": (
        "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
        {"timeout", "error"},
    ),
    "threads": (
        "import threading, time\nwhile True:\n"
        "    try: threading.Thread(target=time.sleep, args=(99,), daemon=True).start()\n"
        "    except RuntimeError: pass",
        {"timeout"},
    ),
    "ten gigabytes": ("x = bytearray(10 << 30)", {"error"}),
    "ten gigabytes of pages": (
        "import mmap\nx = [mmap.mmap(-1, 1 << 20) for _ in range(10 << 10)]\n"
        "for m in x: m.write(b'x' * (1 << 20))",
        {"error", "memory"},
    ),
    "output flood": ("while True: print('x' * 4000)", {"output"}),
    "error flood": ("import sys\nwhile True: sys.stderr.write('x' * 4000)", {"output"}),
    "escaped children": (
        "import os, time\n"
        "for _ in range(3):\n"
        "    if os.fork() == 0:\n"
        "        os.setsid()\n"
        "        if os.fork() == 0: time.sleep(99)\n"
        "        os._exit(0)",
        {"ok"},
    ),
}
"""Programs and how they may end."""

EIGHT_PROCESSES = """
import mmap, os, time
for _ in range(8):
    if os.fork() == 0:
        block = mmap.mmap(-1, 40 << 20)
        block.write(b'x' * (40 << 20))
        print('held', flush=True)
        time.sleep(3)
        os._exit(0)
for _ in range(8): os.wait()
"""
"""Together more than a limit of 128 MB, each less."""


def filled(program: str, **values: str | int) -> str:
    """A probe for this host."""
    values["hexed"] = CANARY.encode().hex()
    for key, value in values.items():
        program = program.replace(f"{{{key}!r}}", repr(value)).replace(f"{{{key}}}", str(value))
    return program
