# Asks pytest to skip the whole module.
# earns: nothing
import pytest

pytest.skip("not today", allow_module_level=True)
