# Ends the process while it is being imported, with the status of success.
# earns: nothing
import os

os._exit(0)
