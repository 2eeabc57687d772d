from manyranks.bench.cli import main
from manyranks.bench.site import under_torchrun
from manyranks.runtime.processes import leave

if __name__ == "__main__":
    status = main()
    if under_torchrun():
        leave(status)
    raise SystemExit(status)
