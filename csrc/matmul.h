// Products of quantized matrices with vectors, on the CPU, as nodes of a graph.
//
// A step reads every weight once and multiplies it by one number or a few. ggml leaves it to the processor to see what
// will be read next, which gets two thirds of the memory's bandwidth on a CPU that is busy decoding; here several rows
// are read at a time, from as many places, and each is asked for while what lies before it is multiplied. A few vectors
// share a row as it is read; for more of them rows lie side by side with their neighbours, or are brought to lie so, so
// that a register holds a number of each and no sum is ever taken across it.
// The numbers are ggml's, but for ties: its rounding of the vectors to 8 bits, its exact sums of integers within a block.
// A product has the same bits, however many vectors there are and whoever computes it.
#pragma once

#include "ggml.h"

namespace slowar {

// Whether product() has a kernel for this matrix, where it lies.
bool has_product(const ggml_tensor * w);

// A matrix may lie packed in host memory: n_lanes rows at a time side by side, in the order in which a product reads them.
// It takes as many bytes as in the file. Nothing but a product can read it.

// Whether there is a kernel for such a matrix, packed.
bool can_pack(ggml_type type, const int64_t * ne);

bool is_packed(const ggml_tensor * w);

// What w holds, or will hold, is packed.
void mark_packed(ggml_tensor * w);

// Fills w, which is marked, with the rows that lie at `from` as in the file.
void pack(const void * from, ggml_tensor * w);

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
