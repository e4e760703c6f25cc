// gemm_bias_relu's v03_one_wave with its scopes compiled in, for benchmarks/scopes.py.
#define MINFER_SCOPES
#include "ops/gemm_bias_relu/v03_one_wave.cu"
