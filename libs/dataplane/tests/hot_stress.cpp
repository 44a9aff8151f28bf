// Stress of the hot-row cache without Python, to be built with a sanitizer: one writer crowds few sets while readers probe them
// through a mapping of their own. Exits 0 if every row that was found was the row asked for, whole.
#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>
#include <vector>

#include "../src/cached_rows.hpp"

using namespace treadle::dataplane;

namespace {

constexpr int64_t ROW_BYTES = 264, KEYS = 400, PROBED = 64;
constexpr int READERS = 2, ROUNDS = 3000, RETIRED_EVERY = 500;

void expect(bool holds, const char* what) {
    if (holds) return;
    std::fprintf(stderr, "broken: %s\n", what);
    std::_Exit(1);
}

// Every word of a row says which row of which table it is of.
void write_row(int64_t row, std::byte* out) {
    for (int64_t i = 0; i < ROW_BYTES / 8; ++i) {
        const uint64_t word = static_cast<uint64_t>(row) * 1000 + static_cast<uint64_t>(i);
        std::memcpy(out + 8 * i, &word, 8);
    }
}

void expect_row(int64_t row, const std::byte* found) {
    std::byte right[ROW_BYTES];
    write_row(row, right);
    expect(std::memcmp(right, found, ROW_BYTES) == 0, "a row that is found is whole");
}

void read(int fd, const Digest& version, unsigned seed, std::atomic<bool>& over, std::atomic<int64_t>& hits) {
    const hot::Reader reader(fd);
    std::mt19937 random(seed);
    std::vector<std::byte> out(PROBED * ROW_BYTES);
    int64_t rows[PROBED], misses[PROBED];
    while (!over) {
        for (auto& row : rows) row = static_cast<int64_t>(random() % KEYS);
        const int64_t missed = reader.probe(reader.find(version, 3), rows, PROBED, out.data(), misses, false);
        for (int64_t i = 0, miss = 0; i < PROBED; ++i) {
            if (miss < missed && misses[miss] == i) {
                ++miss;
                continue;
            }
            expect_row(rows[i], out.data() + i * ROW_BYTES);
        }
        hits += PROBED - missed;
    }
}

}  // namespace

int main() {
    hot::Cache cache(ROW_BYTES, hot::HEADER_BYTES + 16 * hot::View::set_bytes(ROW_BYTES));
    Digest version{};
    version[5] = std::byte{9};
    std::atomic<bool> over{false};
    std::atomic<int64_t> hits{0};
    std::vector<std::thread> readers;
    for (unsigned i = 0; i < READERS; ++i) readers.emplace_back([&, i] { read(cache.fd(), version, i, over, hits); });
    std::mt19937 random(99);
    std::byte row[ROW_BYTES];
    hot::Table table = cache.enter(version, 3);
    for (int round = 0; round < ROUNDS || hits == 0; ++round) {
        for (int i = 0; i < 20; ++i) {
            const auto id = static_cast<int64_t>(random() % KEYS);
            write_row(id, row);
            cache.insert(table, id, row);
        }
        if (round % RETIRED_EVERY == 0) {
            cache.retire(table);
            table = cache.enter(version, 3);
        }
    }
    over = true;
    for (auto& reader : readers) reader.join();
    expect(hits > 0 && cache.totals().evicted > 0, "rows were found and crowded out");
    std::puts("ok");
    return 0;
}
