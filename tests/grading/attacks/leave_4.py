# Registers an exit handler that ends the process, then leaves at import.
# earns: nothing
import atexit
import os

atexit.register(os._exit, 0)
raise SystemExit(0)
