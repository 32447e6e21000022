// Products of quantized matrices with few vectors, on the CPU, as nodes of a graph.
//
// A step reads every weight once and multiplies it by one number or a few. ggml leaves it to the processor to see what
// will be read next, which gets two thirds of the memory's bandwidth on a CPU that is busy decoding; here rows are asked
// for while those before them are multiplied. And a row is decoded once for four vectors, where ggml decodes it for each;
// of K-quants, with more than sixteen vectors, once for all.
// The numbers are ggml's: the same rounding of the vectors to 8 bits, the same exact sums of integers within a block.
#pragma once

#include "ggml.h"

namespace slowar {

// Whether product() has a kernel for this matrix, where it lies, and so many vectors, and is not slower than ggml's.
bool has_product(const ggml_tensor * w, int64_t n_x);

// Products that may share one rounding of their vectors.
constexpr int max_products = 2;

// F32 [k, n_vectors] rounded to what products with matrices of this type read, and a list of work for each of them.
ggml_tensor * rounded(ggml_context * ctx, ggml_type type, ggml_tensor * x);

// w        [k, n_rows], in host memory
// x        of rounded(); the product is the i-th with it
// n_threads: the most that will compute it
// result   F32 [n_rows, n_vectors]
ggml_tensor * product(ggml_context * ctx, ggml_tensor * w, ggml_tensor * x, int i, int n_threads);

}  // namespace slowar
