#include "sampler.h"

#include "error.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

namespace slowar {

namespace {

constexpr float  inf             = std::numeric_limits<float>::infinity();
constexpr double min_temperature = 1e-5;  // upstream divides by no less

[[noreturn]] void fail_highest(const char * highest) {
    fail(SLOWAR_ARGUMENT, "the highest of the logits is %s, expected a finite number", highest);
}

// Larger logits first, equal ones by index, 0 behind all that it equals.
bool ahead(const candidate & a, const candidate & b) {
    return a.logit > b.logit || (a.logit == b.logit && uint32_t(a.index) - 1 < uint32_t(b.index) - 1);
}

// The best k, sorted. They are looked at from `first` on and round to it: of equal ones the earlier is the better.
std::vector<candidate> rank(const float * logits, int32_t n, int32_t k, int32_t first) {
    const auto             most = size_t(std::min(k, n));
    std::vector<candidate> best;  // a heap, the worst in front
    best.reserve(most);
    float      worst = NAN;  // of the best; while there is room NaN, which nothing is below
    const auto look  = [&](int32_t i) {
        const float x = logits[i];
        if (x <= worst) {
            return;
        }
        if (!(x < inf)) {
            fail_highest(std::any_of(logits, logits + n, [](float y) { return std::isnan(y); }) ? "nan" : "inf");
        }
        if (best.size() == most) {
            std::pop_heap(best.begin(), best.end(), ahead);
            best.pop_back();
        }
        best.push_back({ i, x, 0.0 });
        std::push_heap(best.begin(), best.end(), ahead);
        worst = best.size() == most ? best[0].logit : NAN;
    };
    for (int32_t i = first; i < n; i++) {
        look(i);
    }
    for (int32_t i = 0; i < first; i++) {
        look(i);
    }
    std::sort_heap(best.begin(), best.end(), ahead);
    if (best[0].logit == -inf) {
        fail_highest("-inf");
    }
    return best;
}

// How many of the ranked remain: the one whose probability, with those before it, exceeds top_p goes too.
size_t n_within(const std::vector<candidate> & ranked, const float * logits, int32_t n, double top_p) {
    if (top_p >= 1.0) {
        return ranked.size();  // the sum is 1 but for rounding, which is to remove nothing
    }
    const double highest = ranked[0].logit;
    double       total   = 0.0;
    for (int32_t i = 0; i < n; i++) {
        total += std::exp(logits[i] - highest);
    }
    double sum    = 0.0;
    size_t within = 0;
    while (within < ranked.size()) {
        sum += std::exp(ranked[within].logit - highest);
        if (float(sum / total) > float(top_p)) {  // upstream compares float32
            break;
        }
        within++;
    }
    return std::max<size_t>(1, within);
}

// The high half of the 128 bits of a product. In 64 bits, for not every compiler has more.
uint64_t high_product(uint64_t a, uint64_t b) {
    const uint64_t a0 = a & UINT32_MAX, a1 = a >> 32, b0 = b & UINT32_MAX, b1 = b >> 32;
    const uint64_t upper = a1 * b0 + (a0 * b0 >> 32);
    const uint64_t lower = a0 * b1 + (upper & UINT32_MAX);
    return a1 * b1 + (upper >> 32) + (lower >> 32);
}

// Philox4x64-10: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
std::array<uint64_t, 4> philox(std::array<uint64_t, 4> c, uint64_t key0, uint64_t key1) {
    constexpr uint64_t m0 = 0xD2E7470EE14C6C93, m1 = 0xCA5A826395121157;
    for (int round = 0; round < 10; round++) {
        c     = { high_product(m1, c[2]) ^ c[1] ^ key0, m1 * c[2], high_product(m0, c[0]) ^ c[3] ^ key1, m0 * c[0] };
        key0 += 0x9E3779B97F4A7C15;
        key1 += 0xBB67AE8584CAA73B;
    }
    return c;
}

// A candidate's random number: half `index` of the words of blocks 1, 2, ..., the low half of a word first.
double uniform(const slowar_choice_params & params, int32_t index) {
    const auto     i     = uint64_t(index);
    const auto     words = philox({ 1 + i / 8, params.draw, params.frame, 0 }, params.seed, 0);
    const uint64_t half  = (words[i / 2 % 4] >> (i % 2 * 32)) & UINT32_MAX;
    return (double(half) + 0.5) / 4294967296.0;
}

}  // namespace

std::vector<candidate> candidates(const float * logits, int32_t n, const slowar_choice_params & params) {
    if (params.temperature == 0.0) {
        std::vector<candidate> best = rank(logits, n, 1, 0);
        best[0].p                   = 1.0;
        return best;
    }
    std::vector<candidate> kept = rank(logits, n, params.top_k, 1);
    kept.resize(n_within(kept, logits, n, params.top_p));
    const double temperature = std::max(params.temperature, min_temperature);
    const double highest     = kept[0].logit;
    double       total       = 0.0;
    for (candidate & c : kept) {
        c.p    = std::exp((c.logit - highest) / temperature);
        total += c.p;
    }
    for (candidate & c : kept) {
        c.p /= total;
    }
    return kept;
}

int32_t choose(const std::vector<candidate> & kept, const slowar_choice_params & params) {
    if (kept.size() == 1) {
        return kept[0].index;
    }
    int32_t chosen = kept[0].index;
    double  most   = -1.0;
    for (const candidate & c : kept) {
        const double score = c.p / -std::log(uniform(params, c.index));
        if (score > most) {
            most   = score;
            chosen = c.index;
        }
    }
    return chosen;
}

}  // namespace slowar
