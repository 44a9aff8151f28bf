// Every copy of the leaf loops that this CPU can run gives the same results, within exactly sized heap arrays.
// Built with the address and undefined-behaviour sanitizers by test_kernels_paths.py; prints what it ran, exits 1 at the first difference.
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <random>
#include <vector>

#include "../include/treadle/kernels/crc32c.hpp"
#include "../include/treadle/kernels/dedup.hpp"
#include "../include/treadle/kernels/dequantise.hpp"
#include "../include/treadle/kernels/lookup.hpp"
#include "../include/treadle/kernels/nearest.hpp"

using namespace treadle::kernels;

namespace {

std::mt19937_64 random_words(1);

void require(bool condition, const char* what) {
    if (condition) return;
    std::printf("different: %s\n", what);
    std::exit(1);
}

struct Step {
    std::vector<int64_t> tokens, lookback;
    std::vector<int32_t> starts{0};
    std::vector<char> dead, lookback_dead;
    int64_t columns;

    Step(int64_t requests, int64_t depth, int64_t vocabulary) : columns(depth) {
        for (int64_t r = 0; r < requests; ++r) starts.push_back(starts.back() + static_cast<int32_t>(random_words() % 7));
        for (int32_t i = 0; i < starts.back(); ++i) tokens.push_back(static_cast<int64_t>(random_words() % static_cast<uint64_t>(vocabulary)));
        for (int64_t i = 0; i < requests * depth; ++i) lookback.push_back(static_cast<int64_t>(random_words() % static_cast<uint64_t>(vocabulary + 1)) - 1);
        for (size_t i = 0; i < tokens.size(); ++i) dead.push_back(random_words() % 8 == 0);
        for (size_t i = 0; i < lookback.size(); ++i) lookback_dead.push_back(random_words() % 8 == 0);
    }
    WindowsView view(bool masks) const {
        const auto marks = [&](const std::vector<char>& mask) { return masks ? reinterpret_cast<const bool*>(mask.data()) : nullptr; };
        return {tokens.data(), static_cast<int64_t>(tokens.size()), starts.data(), static_cast<int64_t>(starts.size()) - 1, lookback.data(), columns,
                marks(dead), marks(lookback_dead)};
    }
};

void compare_hashes(std::vector<int32_t> orders, int heads, int64_t smallest_prime, Family family) {
    const int columns = static_cast<int>(orders.size()) * heads;
    std::vector<uint64_t> multipliers(static_cast<size_t>(orders.back()));
    for (auto& multiplier : multipliers) multiplier = (random_words() >> 12) | 1;  // below 2^52: with ids below 2^11 products stay below 2^63
    std::vector<int64_t> primes(static_cast<size_t>(columns)), offsets(primes.size());
    for (auto& prime : primes) prime = smallest_prime + static_cast<int64_t>(random_words() % 1000);
    std::exclusive_scan(primes.begin(), primes.end(), offsets.begin(), int64_t{0});
    std::vector<int32_t> token_map(2000);
    for (auto& id : token_map) id = static_cast<int32_t>(random_words() % 2000);
    const HashPlanView plan{family, orders.back(), static_cast<int>(orders.size()), orders.data(), heads, multipliers.data(), primes.data(), offsets.data(), 5, 5,
                            family == Family::qwen_ple ? nullptr : token_map.data(), 2000};
    const Step step(60, orders.back() - 1, 2000);
    for (const bool masks : {false, true}) {
        const WindowsView windows = step.view(masks);
        require(tokens_in_range(plan, windows), "tokens_in_range");
        const auto hashed = [&](auto&& hash, int64_t first, int64_t last) {
            std::vector<int64_t> rows(static_cast<size_t>((last - first) * columns));
            hash(plan, windows, first, last, rows.data());
            return rows;
        };
        const std::vector<int64_t> expected = hashed(detail::hash_plain, 0, windows.token_count);
        require(hashed(hash_rows, 0, windows.token_count) == expected, "hash_rows");
        if (detail::fits_vector(plan)) {
            require(hashed(detail::hash_baseline, 0, windows.token_count) == expected, "hash_baseline");
            if (detail::cpu_has_avx2()) require(hashed(detail::hash_avx2, 0, windows.token_count) == expected, "hash_avx2");
            if (detail::cpu_has_avx512()) require(hashed(detail::hash_avx512, 0, windows.token_count) == expected, "hash_avx512");
        }
        for (int64_t first = 0; first < windows.token_count; first += 3) {  // a range may begin anywhere inside a request
            const int64_t last = std::min(windows.token_count, first + 5);
            const std::vector<int64_t> part(expected.begin() + first * columns, expected.begin() + last * columns);
            require(hashed(hash_rows, first, last) == part, "hash_rows of a range");
        }
    }
}

void compare_gathers(int64_t row_bytes) {
    const int64_t table_rows = 37;
    std::vector<std::byte> table(static_cast<size_t>(table_rows * row_bytes));
    for (auto& byte : table) byte = static_cast<std::byte>(random_words());
    for (const int64_t count : {0, 1, 16, 17, 50}) {
        std::vector<int64_t> rows(static_cast<size_t>(count));
        for (auto& row : rows) row = static_cast<int64_t>(random_words() % static_cast<uint64_t>(table_rows));
        if (count != 0) rows.back() = table_rows - 1;
        require(first_out_of_range(rows.data(), count, table_rows) == -1, "first_out_of_range");
        const auto compare = [&](auto&& gather_by, int64_t ahead, const char* what) {
            std::vector<std::byte> out(static_cast<size_t>(count * row_bytes));
            gather_by(table.data(), row_bytes, rows.data(), count, out.data(), ahead);
            for (int64_t i = 0; i < count; ++i) {
                const auto* row = table.data() + rows[static_cast<size_t>(i)] * row_bytes;
                require(std::equal(row, row + row_bytes, out.data() + i * row_bytes), what);
            }
        };
        for (const int64_t ahead : {int64_t{1}, PREFETCH_ROWS, PREFETCH_ROWS_MAX}) {
            compare(detail::gather_baseline, ahead, "gather_baseline");
            if (detail::cpu_has_avx2()) compare(detail::gather_avx2, ahead, "gather_avx2");
        }
        compare([](auto... arguments) { gather(arguments...); }, PREFETCH_ROWS, "gather");
    }
}

void compare_dequantised(ValueType values, int64_t value_bits, ScaleType scales, int64_t dim, int64_t block) {
    const int64_t value_bytes = dim * value_bits / 8;
    const int64_t scale_bytes = dim / block * inline_scale_bytes(scales);
    const RowFormat format{values, scales, value_bytes + scale_bytes, dim, block, 0.000199f};
    for (const int64_t count : {0, 1, 7}) {
        std::vector<std::byte> rows(static_cast<size_t>(count * format.row_bytes));
        for (auto& byte : rows) byte = static_cast<std::byte>(random_words());
        const auto read = [&](auto&& dequantise_rows) {
            std::vector<float> out(static_cast<size_t>(count * dim));
            dequantise_rows(format, rows.data(), count, out.data());
            std::vector<uint32_t> bits;
            for (const float value : out) bits.push_back(value != value ? 0x7fc00000u : std::bit_cast<uint32_t>(value));
            return bits;
        };
        const std::vector<uint32_t> expected = read(detail::dequantise_baseline);
        require(read(dequantise) == expected, "dequantise");
        if (detail::cpu_has_avx2()) require(read(detail::dequantise_avx2) == expected, "dequantise_avx2");
        if (detail::cpu_has_avx512()) require(read(detail::dequantise_avx512) == expected, "dequantise_avx512");
    }
}

void compare_dequantised_formats() {
    const int64_t value_bits[] = {16, 16, 32, 8, 8, 4, 4};
    for (int type = 0; type < 7; ++type) {
        for (const ScaleType scales : {ScaleType::none, ScaleType::ue8m0, ScaleType::fp16, ScaleType::fp32, ScaleType::all_rows}) {
            for (const int64_t block : {1, 3, 5, 16, 32, 100}) {
                compare_dequantised(static_cast<ValueType>(type), value_bits[type], scales, 2 * block, block);
                compare_dequantised(static_cast<ValueType>(type), value_bits[type], scales, 6 * block, block);
            }
        }
    }
}

void compare_batches_without_repeats() {
    for (const int64_t count : {0, 1, 7, 2048, 2049, 9000}) {  // around where the table of ids leaves the stack
        const auto size = static_cast<size_t>(count);
        std::vector<int64_t> rows(size), unique(size);
        std::vector<int32_t> inverse(size);
        for (auto& row : rows) row = static_cast<int64_t>(random_words() % 500) << 20;
        const int64_t found = unique_rows(rows.data(), count, unique.data(), inverse.data());
        require(0 <= found && found <= std::min<int64_t>(count, 500), "unique_rows");
        for (size_t i = 0; i < size; ++i) require(unique[static_cast<size_t>(inverse[i])] == rows[i], "inverse");
        std::vector<std::byte> fetched(static_cast<size_t>(found) * 20), out(size * 20);
        for (auto& byte : fetched) byte = static_cast<std::byte>(random_words());
        spread(fetched.data(), 20, inverse.data(), count, out.data());
        for (size_t i = 0; i < size; ++i) {
            const auto* row = fetched.data() + inverse[i] * 20;
            require(std::equal(row, row + 20, out.data() + i * 20), "spread");
        }
    }
}

void compare_nearest(KeyType type, int64_t count, int64_t entries, int64_t dim, int64_t lists) {
    const auto whole = [&](int64_t range) { return static_cast<int>(random_words() % static_cast<uint64_t>(2 * range + 1)) - static_cast<int>(range); };
    std::vector<float> queries(static_cast<size_t>(count * dim)), list_keys(static_cast<size_t>(lists * dim));
    for (auto& number : queries) number = static_cast<float>(whole(3));  // whole numbers: every order of summing gives the same
    for (auto& number : list_keys) number = static_cast<float>(whole(3));
    const int64_t word = type == KeyType::f32 ? 4 : type == KeyType::bf16 ? 2 : 1;
    std::vector<std::byte> keys(static_cast<size_t>(entries * dim * word));
    for (int64_t i = 0; i < entries * dim; ++i) {
        const int number = whole(3);
        const auto bits = std::bit_cast<uint32_t>(static_cast<float>(number));
        const uint32_t stored = type == KeyType::f32 ? bits : type == KeyType::bf16 ? bits >> 16 : static_cast<uint32_t>(number);
        std::memcpy(keys.data() + i * word, &stored, static_cast<size_t>(word));  // this test runs on little-endian machines
    }
    std::vector<uint16_t> scales(type == KeyType::int8 ? static_cast<size_t>(entries) : 0, 0x3800);  // 0.5
    std::vector<int32_t> starts(1, 0);
    for (int64_t list = 1; list < lists; ++list) starts.push_back(static_cast<int32_t>(random_words() % static_cast<uint64_t>(entries + 1)));
    std::sort(starts.begin(), starts.end());
    starts.push_back(static_cast<int32_t>(entries));
    if (lists != 0) require(lists_fit(starts.data(), lists, entries), "lists_fit");
    const NearestView view{type, keys.data(), scales.data(), entries, dim, list_keys.data(), starts.data(), lists, 3};
    std::vector<uint64_t> wanted(static_cast<size_t>(lists)), ranked(wanted.size());
    const auto found = [&](auto&& nearest_by) {
        std::vector<int32_t> indices(static_cast<size_t>(count));
        std::vector<float> dots(indices.size());
        nearest_by(view, queries.data(), count, NearestWorkspace{wanted.data(), ranked.data()}, indices.data(), dots.data());
        for (const float dot : dots) indices.push_back(std::bit_cast<int32_t>(dot));
        return indices;
    };
    const std::vector<int32_t> expected = found(detail::nearest_baseline);
    require(std::find(expected.begin(), expected.begin() + count, -1) == expected.begin() + count, "nearest_baseline");
    require(found(nearest) == expected, "nearest");
    if (detail::cpu_has_avx2()) require(found(detail::nearest_avx2) == expected, "nearest_avx2");
    if (detail::cpu_has_avx512()) require(found(detail::nearest_avx512) == expected, "nearest_avx512");
}

void compare_searches() {
    for (const KeyType type : {KeyType::f32, KeyType::bf16, KeyType::int8}) {
        for (const int64_t dim : {1, 3, 4, 8, 16, 17, 48, 65}) {
            for (const int64_t count : {0, 1, 2, 3, 4, 64, 67}) {
                for (const int64_t entries : {1, 4, 23}) {
                    for (const int64_t lists : {0, 1, 6}) compare_nearest(type, count, entries, dim, lists);
                }
            }
        }
    }
}

void compare_checksums() {
    std::vector<std::byte> data(40'000);
    for (auto& byte : data) byte = static_cast<std::byte>(random_words());
    for (size_t size = 0; size <= data.size(); size = size < 100 ? size + 1 : size * 3 / 2) {
        const auto* end = data.data() + data.size();
        const uint32_t expected = ~detail::crc_by_table(~7u, end - size, size);
        require(crc32c(7, end - size, size) == expected, "crc32c");
    }
}

}  // namespace

int main() {
    for (const Family family : {Family::demo, Family::deepseek_v41, Family::qwen_ple}) {
        for (const int64_t prime : {int64_t{2}, detail::PRIME_MIN_VECTOR, int64_t{20'000'003}, int64_t{1} << 40}) {
            compare_hashes({2, 3}, 8, prime, family);
            compare_hashes({2, 3, 4}, 8, prime, family);
            compare_hashes({1}, 1, prime, family);
            compare_hashes({1, 5, 16}, 11, prime, family);
            compare_hashes({1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, 17, prime, family);  // the most groups of heads
            compare_hashes({16}, 256, prime, family);
        }
    }
    for (int64_t row_bytes = 16; row_bytes <= 4096; row_bytes += row_bytes < 400 ? 1 : 97) compare_gathers(row_bytes);
    compare_gathers(4096);
    compare_batches_without_repeats();
    compare_checksums();
    compare_dequantised_formats();
    compare_searches();
    std::printf("same: plain baseline%s%s%s\n", detail::cpu_has_avx2() ? " avx2" : "", detail::cpu_has_avx512() ? " avx512" : "",
                detail::cpu_has_crc32c() ? " crc32" : "");
}
