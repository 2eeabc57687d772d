# Sleeps at import.
# earns: nothing
import time

if __name__ != "__main__":
    time.sleep(3600)
