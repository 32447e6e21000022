// What the memory of this machine can deliver: the floor that a step's time is compared with.
#include "error.h"
#include "platform.h"
#include "slowar.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

using namespace slowar;

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

slowar_status slowar_read_bandwidth(int32_t n_threads, double * bytes_per_second, slowar_error * err) {
    return guard(err, [&] {
        if (!bytes_per_second || n_threads < 1 || !can_start_threads(n_threads)) {
            fail(SLOWAR_ARGUMENT, "n_threads is %d, expected at least 1 and what the system allows", n_threads);
        }
        const std::vector<uint64_t> words(n_words, 1);
        std::atomic<uint64_t>       total(0);
        double                      best = 0.0;
        for (int round = 0; round < n_rounds; round++) {
            const auto               start = std::chrono::steady_clock::now();
            std::vector<std::thread> threads;
            for (int32_t i = 0; i < n_threads; i++) {
                const size_t begin = n_words * size_t(i) / size_t(n_threads);
                const size_t end   = n_words * size_t(i + 1) / size_t(n_threads);
                threads.emplace_back([&, begin, end] { total += sum_words(words.data() + begin, end - begin); });
            }
            for (std::thread & t : threads) {
                t.join();
            }
            const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
            best = std::max(best, double(n_words * sizeof(uint64_t)) / seconds.count());
        }
        if (total == 0) {
            fail(SLOWAR_INTERNAL, "the sum of %zu ones is 0", n_words);  // so that no compiler drops the reading
        }
        *bytes_per_second = best;
    });
}
