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

constexpr int n_rounds = 5;

uint64_t sum_words(const uint64_t * words, size_t n) {
    uint64_t sums[8] = {};
    for (size_t i = 0; i + 8 <= n; i += 8) {
        for (size_t lane = 0; lane < 8; lane++) {
            sums[lane] += words[i + lane];
        }
    }
    uint64_t all = 0;
    for (uint64_t sum : sums) {
        all += sum;
    }
    return all;
}

}  // namespace

double read_bandwidth(int n_threads) {
    const std::vector<uint64_t> words(n_words, 1);
    std::vector<uint64_t>       totals(size_t(n_threads), 0);
    double                      best = 0.0;
    for (int round = 0; round < n_rounds; round++) {
        const auto start = std::chrono::steady_clock::now();
        run_threads(n_threads, [&](int i) {
            const size_t begin  = n_words * size_t(i) / size_t(n_threads);
            const size_t end    = n_words * size_t(i + 1) / size_t(n_threads);
            totals[size_t(i)]  += sum_words(words.data() + begin, end - begin);
        });
        const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
        best = std::max(best, double(n_words * sizeof(uint64_t)) / seconds.count());
    }
    if (totals[0] == 0) {
        fail(SLOWAR_INTERNAL, "the sum of ones is 0");  // so that no compiler drops the reading
    }
    return best;
}

}  // namespace slowar
