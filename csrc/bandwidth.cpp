#include "bandwidth.h"

#include "error.h"
#include "platform.h"

#include <algorithm>
#include <chrono>
#include <vector>

namespace slowar {

namespace {

// Far beyond any cache, small beside a model.
constexpr size_t n_words = size_t(1) << 26;  // 512 MiB

constexpr int n_rounds = 2;

constexpr size_t lanes = 8;

// How far ahead memory is asked for what comes next.
constexpr size_t ahead = 256;  // words, 2 KiB

// Words [0, n) in so many equal parts, a little of each in turn; what does not divide is left.
template <size_t n_parts> uint64_t sum_words(const uint64_t * words, size_t n) {
    const size_t n_part               = n / n_parts;
    uint64_t     sums[n_parts][lanes] = {};
    for (size_t i = 0; i + lanes <= n_part; i += lanes) {
        for (size_t part = 0; part < n_parts; part++) {
#if defined(__GNUC__)
            __builtin_prefetch(words + part * n_part + std::min(i + ahead, n_part - lanes));
#endif
            for (size_t lane = 0; lane < lanes; lane++) {
                sums[part][lane] += words[part * n_part + i + lane];
            }
        }
    }
    uint64_t all = 0;
    for (const auto & part : sums) {
        for (uint64_t sum : part) {
            all += sum;
        }
    }
    return all;
}

// From one place or from several at once: which a core gets more from depends on the machine.
constexpr uint64_t (*ways[])(const uint64_t * words, size_t n) = { sum_words<1>, sum_words<4> };

}  // namespace

double read_bandwidth(int n_threads) {
    const std::vector<uint64_t> words(n_words, 1);
    std::vector<uint64_t>       totals(size_t(n_threads), 0);
    double                      best = 0.0;
    for (int round = 0; round < n_rounds; round++) {
        for (const auto sum : ways) {
            const auto start = std::chrono::steady_clock::now();
            run_threads(n_threads, [&](int i) {
                const size_t begin  = n_words * size_t(i) / size_t(n_threads);
                const size_t end    = n_words * size_t(i + 1) / size_t(n_threads);
                totals[size_t(i)]  += sum(words.data() + begin, end - begin);
            });
            const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
            best = std::max(best, double(n_words * sizeof(uint64_t)) / seconds.count());
        }
    }
    if (totals[0] == 0) {
        fail(SLOWAR_INTERNAL, "the sum of ones is 0");  // so that no compiler drops the reading
    }
    return best;
}

}  // namespace slowar
