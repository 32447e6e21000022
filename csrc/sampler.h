// One choice between candidates by their logits, as the upstream sampler makes it: docs/generation.md. Arrays in, no ggml.
#pragma once

#include "slowar.h"

#include <vector>

namespace slowar {

struct candidate {
    int32_t index;
    float   logit;
    double  p;
};

// What may be chosen, best first, with its probabilities. Throws SLOWAR_ARGUMENT when a logit is NaN or +inf or all are
// -inf, SLOWAR_MEMORY.
std::vector<candidate> candidates(const float * logits, int32_t n, const slowar_choice_params & params);

// The one of them that the random numbers of (seed, frame, draw) choose: its index.
int32_t choose(const std::vector<candidate> & kept, const slowar_choice_params & params);

}  // namespace slowar
