"""The smallest job: one CPU host.

    python examples/hello.py

The function runs in another process. Its output is printed while it runs, and the call returns its
value.
"""

import os

import kinetic


@kinetic.run(accelerator="cpu")
def hello(name):
    print(f"Saying hello to {name}, far away from the caller")
    return {"greeting": f"Hello, {name}!", "pid": os.getpid()}


def main():
    answer = hello("world")
    where = "another process" if answer["pid"] != os.getpid() else "the same process"
    print(f"{answer['greeting']} (from {where})")


if __name__ == "__main__":
    main()
