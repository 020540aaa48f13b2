"""The smallest job: one CPU host.

    python examples/hello.py

The function runs in another process. Its output arrives while it runs, and its return value is the
value of the call.
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
