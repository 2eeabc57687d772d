"""The grader: marks labs of people that it doesn't trust.

Assertions run in a trusted process; a submission's code runs in sandboxed children and can only answer the call that it
is asked, with plain data. From the inside out:

- `wire`      plain data as bytes, checked when it comes back (never pickle)
- `kernel`    the few system calls that Python has no name for
- `zygote`    inside the sandbox: imports NumPy once, forks a child for each one that is asked for
- `child`     inside the sandbox: runs the submission's functions
- `bubblewrap`, `sandbox`   outside: starts the sandbox, asks for children, talks to them, ends them
- `proxy`     the module that a lab's tests see in the submission's place
- `worker`    one submission: pytest with that module
- `lab`, `collect`, `late`, `batch`    what is graded, by which rules, how many at once
- `marks`, `canvas`, `feedback`, `report`, `release`, `gradescope`    what comes out
"""
