// Every copy of the loops around attention states that this CPU can run gives the same results, within exactly sized heap arrays.
// Built with the address and undefined-behaviour sanitizers by test_kernels_paths.py; prints what it ran, exits 1 at the first difference.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <random>
#include <vector>

#include "../include/treadle/kernels/decode.hpp"
#include "../include/treadle/kernels/entry_states.hpp"

using namespace treadle::kernels;

namespace {

std::mt19937_64 random_words(1);

void require(bool condition, const char* what) {
    if (condition) return;
    std::printf("different: %s\n", what);
    std::exit(1);
}

void require_close(const std::vector<float>& left, const std::vector<float>& right, const char* what) {
    require(left.size() == right.size(), what);
    for (size_t i = 0; i < left.size(); ++i) require(std::fabs(left[i] - right[i]) <= 1e-4f * (1 + std::fabs(right[i])), what);
}

std::vector<float> random_numbers(int64_t count) {
    std::normal_distribution<float> normal;
    std::vector<float> numbers(static_cast<size_t>(count));
    for (auto& number : numbers) number = normal(random_words);
    return numbers;
}

void compare_states(KeyType type, int64_t books, int64_t lookups, int64_t joined, int64_t dim, int64_t tokens, bool whitened) {
    const int64_t entries = 9, heads = books * lookups * joined, width = joined * dim, word = type == KeyType::f32 ? 4 : type == KeyType::bf16 ? 2 : 1;
    const auto stored = [&] {
        std::vector<std::byte> bytes(static_cast<size_t>(books * entries * width * word));
        for (int64_t i = 0; i < books * entries * width; ++i) {
            const int number = static_cast<int>(random_words() % 201) - 100;
            const auto bits = std::bit_cast<uint32_t>(static_cast<float>(number));
            const uint32_t kept = type == KeyType::f32 ? bits : type == KeyType::bf16 ? bits >> 16 : static_cast<uint32_t>(number);
            std::memcpy(bytes.data() + i * word, &kept, static_cast<size_t>(word));
        }
        return bytes;
    };
    const auto keys = stored(), states = stored();
    const std::vector<uint16_t> key_scales(static_cast<size_t>(books * entries), 0x3800), state_scales(static_cast<size_t>(books * entries * joined), 0x3C00);
    const auto log_z = random_numbers(books * entries * joined), thresholds = random_numbers(books), whitening = random_numbers(heads * dim * dim);
    std::vector<int32_t> heads_of(static_cast<size_t>(heads));
    std::iota(heads_of.begin(), heads_of.end(), 0);
    std::shuffle(heads_of.begin(), heads_of.end(), random_words);
    const NearestView search{type, keys.data(), type == KeyType::int8 ? key_scales.data() : nullptr, entries, width, nullptr, nullptr, 0, 1};
    const EntriesView view{search, books, lookups, joined, heads, dim, heads_of.data(), whitened ? whitening.data() : nullptr, states.data(),
                           type == KeyType::int8 ? state_scales.data() : nullptr, log_z.data(), thresholds.data()};
    const auto queries = random_numbers(tokens * heads * dim);
    std::vector<int64_t> places(static_cast<size_t>(tokens));
    for (auto& place : places) place = static_cast<int64_t>(random_words() % static_cast<uint64_t>(tokens));
    const QueriesView asked{queries.data(), heads * dim, places.data(), tokens};
    const auto at_once = static_cast<size_t>(std::min(tokens, tokens_at_once(view)) * lookups);
    const auto found = [&](auto&& find) {
        std::vector<float> key_space(at_once * static_cast<size_t>(width)), dots(at_once), out(static_cast<size_t>(tokens * heads * dim)),
            out_log_z(static_cast<size_t>(tokens * heads)), cosines(static_cast<size_t>(tokens * books * lookups));
        std::vector<int32_t> indices(at_once);
        std::vector<char> outside(cosines.size());
        const bool all = find(view, asked, EntriesWorkspace{key_space.data(), indices.data(), dots.data(), {nullptr, nullptr}},
                              FoundStates{out.data(), out_log_z.data(), cosines.data(), reinterpret_cast<bool*>(outside.data())});
        require(all, "entry_states finds");
        out.insert(out.end(), out_log_z.begin(), out_log_z.end());
        out.insert(out.end(), cosines.begin(), cosines.end());
        return out;
    };
    const auto expected = found(detail::entry_states_baseline);
    require_close(found(entry_states), expected, "entry_states");
    if (detail::cpu_has_avx2()) require_close(found(detail::entry_states_avx2), expected, "entry_states_avx2");
    if (detail::cpu_has_avx512()) require_close(found(detail::entry_states_avx512), expected, "entry_states_avx512");
    std::vector<float> a = random_numbers(tokens * heads * dim), a_log_z = random_numbers(tokens * heads);
    merge_states(heads, dim, nullptr, tokens, expected.data(), expected.data() + a.size(), a.data(), a_log_z.data());
}

void compare_decoding(int64_t kv_heads, int64_t groups, int64_t dim, int64_t length) {
    const HeadsShape shape{kv_heads * groups, kv_heads, dim};
    const int64_t capacity = length + 1;
    const auto cache = random_numbers(2 * kv_heads * capacity * dim), query = random_numbers(shape.heads * dim), appended = random_numbers(2 * kv_heads * dim);
    const auto attended = [&](auto&& decode_by) {
        std::vector<float> own(cache), space(static_cast<size_t>(decode_space(shape, length))), out(query.size()), log_z(static_cast<size_t>(shape.heads));
        decode_by(shape, SequenceView{own.data(), capacity, length}, query.data(), appended.data(), space.data(), out.data(), log_z.data());
        out.insert(out.end(), log_z.begin(), log_z.end());
        out.insert(out.end(), own.begin(), own.end());
        return out;
    };
    const auto expected = attended(detail::decode_baseline);
    const auto dispatched = [](const auto&... arguments) { decode(arguments...); };
    require_close(attended(dispatched), expected, "decode");
    if (detail::cpu_has_avx2()) require_close(attended(detail::decode_avx2), expected, "decode_avx2");
    if (detail::cpu_has_avx512()) require_close(attended(detail::decode_avx512), expected, "decode_avx512");

    const int64_t count = length + 1;
    const auto keys = random_numbers(kv_heads * count * dim), values = random_numbers(kv_heads * count * dim), biases = random_numbers(kv_heads * count);
    const KeysView few{keys.data(), values.data(), biases.data(), count};
    const auto seen = [&](auto&& attend_by) {
        std::vector<float> space(static_cast<size_t>(decode_space(shape, count))), out(query.size()), log_z(static_cast<size_t>(shape.heads));
        attend_by(shape, few, query.data(), space.data(), out.data(), log_z.data());
        out.insert(out.end(), log_z.begin(), log_z.end());
        return out;
    };
    const auto by_baseline = seen(detail::attend_keys_baseline);
    require_close(seen([](const auto&... arguments) { attend_keys(arguments...); }), by_baseline, "attend_keys");
    if (detail::cpu_has_avx2()) require_close(seen(detail::attend_keys_avx2), by_baseline, "attend_keys_avx2");
    if (detail::cpu_has_avx512()) require_close(seen(detail::attend_keys_avx512), by_baseline, "attend_keys_avx512");
}

void compare_attention() {
    for (const KeyType type : {KeyType::f32, KeyType::bf16, KeyType::int8}) {
        for (const int64_t dim : {1, 4, 7, 16, 33, 64}) {
            for (const int64_t tokens : {0, 1, 3, 40}) {
                compare_states(type, 1, 3, 3, dim + 3, tokens, false);  // wide enough that no two entries are equally near
                compare_states(type, 2, 1, 2, dim + 3, tokens, true);
            }
        }
    }
    for (const int64_t dim : {1, 4, 7, 16, 33, 64, 128}) {
        for (const int64_t groups : {1, 2, 3, 4, 5, 9}) {
            for (const int64_t length : {0, 1, 3, 4, 15, 16, 17, 100}) compare_decoding(2, groups, dim, length);
        }
    }
}

}  // namespace

int main() {
    compare_attention();
    std::printf("same: plain baseline%s%s\n", detail::cpu_has_avx2() ? " avx2" : "", detail::cpu_has_avx512() ? " avx512" : "");
}
