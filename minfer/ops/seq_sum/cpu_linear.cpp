// cpu_linear: each sequence summed up once, in 32 parts that the compiler makes vectors of; threads over the sequences.
// Idea: O(batch * length); additions that do not wait for each other fill the vector units. `launch_linear<512>` in a file
// of its own is the same with loops for the length 512 (`linear.h`).
// Expected: cpu_naive divided by the length, and by about 30 again; memory's speed with a few cores.
#include "linear.h"

MINFER_SEQ_SUM(seq_sum_cpu_linear, minfer::launch_linear<0>)
