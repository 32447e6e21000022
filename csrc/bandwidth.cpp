#include "bandwidth.h"

#include "error.h"
#include "platform.h"

#include <algorithm>
#include <chrono>
#include <iterator>
#include <vector>

namespace slowar {

namespace {

// Far beyond any cache, small beside a model.
constexpr size_t n_words = size_t(1) << 26;  // 512 MiB

// Each way has as many turns, one after the other: what else goes on there meets them all.
constexpr int n_rounds = 3;

constexpr size_t lanes = 8;

// Words [0, n) in so many equal parts, a little of each in turn; what does not divide is left. Memory is asked for what
// comes so many words later, or left to see it coming.
template <size_t n_parts, size_t ahead> uint64_t sum_words(const uint64_t * words, size_t n) {
    const size_t n_part               = n / n_parts;
    uint64_t     sums[n_parts][lanes] = {};
    for (size_t i = 0; i + lanes <= n_part; i += lanes) {
        for (size_t part = 0; part < n_parts; part++) {
#if defined(__GNUC__)
            if (ahead > 0) {
                __builtin_prefetch(words + part * n_part + std::min(i + ahead, n_part - lanes));
            }
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

// From one place or from several at once, 512 bytes ahead or not: which a core gets most from depends on the machine and
// its hour.
constexpr uint64_t (*ways[])(const uint64_t * words, size_t n) = { sum_words<1, 0>, sum_words<4, 0>, sum_words<4, 64> };

}  // namespace

double read_bandwidth(int n_threads) {
    std::vector<uint64_t> words;
    words.reserve(n_words);
    ask_for_large_pages(words.data(), n_words * sizeof(uint64_t));
    words.resize(n_words, 1);

    std::vector<uint64_t>         totals(size_t(n_threads), 0);
    std::chrono::duration<double> times[std::size(ways)] = {};
    for (int round = 0; round < n_rounds; round++) {
        for (size_t way = 0; way < std::size(ways); way++) {
            const auto start = std::chrono::steady_clock::now();
            run_threads(n_threads, [&](int i) {
                const size_t begin  = n_words * size_t(i) / size_t(n_threads);
                const size_t end    = n_words * size_t(i + 1) / size_t(n_threads);
                totals[size_t(i)]  += ways[way](words.data() + begin, end - begin);
            });
            times[way] += std::chrono::steady_clock::now() - start;
        }
    }
    if (totals[0] == 0) {
        fail(SLOWAR_INTERNAL, "the sum of ones is 0");  // so that no compiler drops the reading
    }
    const auto least = *std::min_element(std::begin(times), std::end(times));
    return double(n_rounds * n_words * sizeof(uint64_t)) / least.count();
}

}  // namespace slowar
