// What tokens find in a dictionary of attention states: query heads to lookup keys, keys to their nearest entries, and the rows of those.
//
// All in one pass over a block of tokens, because apart each of the steps costs more in calls and copies than in work: for one token of
// nine heads the keys, the gather and the merge around a scan of 20 microseconds took 150 as separate array operations.
// Source: arXiv 2605.18226, equations 6 and 7, sections 3.5 and 3.6.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>

#include "dequantise.hpp"
#include "nearest.hpp"
#include "products.hpp"
#include "target.hpp"

namespace treadle::kernels {

inline constexpr float KEY_LENGTH_MIN = 1e-12f;  // a query of zeros stays zeros

// One layer. An entry stands for `joined` query heads; a token makes `lookups` lookups in each of `books` codebooks, and every query head
// is in one of them.
struct EntriesView {
    NearestView search;  // of the first codebook; the others lie behind it
    int64_t books;
    int64_t lookups;
    int64_t joined;
    int64_t heads;
    int64_t head_dim;
    const int32_t* heads_of;       // [books, lookups, joined]
    const float* whitening;        // [heads, head_dim, head_dim], applied before joining, or nullptr
    const std::byte* states;       // [books, entries, joined, head_dim] of the keys' type
    const uint16_t* state_scales;  // [books, entries, joined] fp16 bits for int8, else nullptr
    const float* log_z;            // [books, entries, joined]
    const float* thresholds;       // [books]: a lookup with a smaller cosine is outside
};

// Tokens i < count have the queries [heads, head_dim] at `queries` + places[i] * stride (places nullptr: i * stride).
struct QueriesView {
    const float* queries;
    int64_t stride;  // numbers from one token to the next
    const int64_t* places;
    int64_t count;
};

// For each token: states [heads, head_dim], log_z [heads], cosines and outside [books, lookups].
struct FoundStates {
    float* states;
    float* log_z;
    float* cosines;
    bool* outside;
};

// Tokens of one block: as many as one pass of a search takes queries.
inline int64_t tokens_at_once(const EntriesView& view) { return std::max<int64_t>(1, QUERIES_AT_ONCE / view.lookups); }

// What a lookup writes while it runs: keys [tokens_at_once, lookups, dim], and an index and a product for each key.
struct EntriesWorkspace {
    float* keys;
    int32_t* indices;
    float* dots;
    NearestWorkspace lists;
};

namespace detail {

template <int WIDTH>
TREADLE_INLINE void whiten(const float* matrix, const float* head, int64_t dim, float* out) {
    int64_t at = 0;
    for (; at + TILE_KEYS <= dim; at += TILE_KEYS) {
        Four products;
        products_of_four<KeyType::f32, WIDTH, 1>(&head, matrix + at * dim, dim, &products);
        std::memcpy(out + at, &products, sizeof products);
    }
    for (; at < dim; ++at) out[at] = product_of_one<KeyType::f32, WIDTH>(head, matrix + at * dim, dim);
}

// One lookup key of length 1.
template <int WIDTH>
TREADLE_INLINE void make_key(const EntriesView& view, const float* query, const int32_t* heads, float* key) {
    const int64_t dim = view.head_dim;
    for (int64_t j = 0; j < view.joined; ++j) {
        const float* const head = query + heads[j] * dim;
        if (view.whitening != nullptr) {
            whiten<WIDTH>(view.whitening + heads[j] * dim * dim, head, dim, key + j * dim);
        } else {
            std::memcpy(key + j * dim, head, static_cast<size_t>(dim) * sizeof(float));
        }
    }
    const float length = std::sqrt(product_of_one<KeyType::f32, WIDTH>(key, key, view.search.dim));
    const float divisor = length < KEY_LENGTH_MIN ? KEY_LENGTH_MIN : length;  // NaN stays NaN, and finds nothing
    for (int64_t at = 0; at < view.search.dim; ++at) key[at] /= divisor;
}

template <KeyType TYPE, int WIDTH>
TREADLE_INLINE void read_state(const typename KeyWord<TYPE>::Word* row, float scale, int64_t dim, float* out) {
    int64_t at = 0;
    for (; at + WIDTH <= dim; at += WIDTH) {
        typename Lanes<WIDTH>::Vector numbers;
        read_lanes<WIDTH>(row + at, numbers);
        if constexpr (TYPE == KeyType::int8) numbers *= scale;
        std::memcpy(out + at, &numbers, sizeof numbers);
    }
    for (; at < dim; ++at) out[at] = key_number(row[at]) * scale;
}

// The rows of a token's lookups in one codebook, to the places of their heads.
template <KeyType TYPE, int WIDTH>
TREADLE_INLINE void take_rows(const EntriesView& view, int64_t book, const int32_t* indices, float* states, float* log_z) {
    const auto* const rows = reinterpret_cast<const typename KeyWord<TYPE>::Word*>(view.states);
    const int32_t* heads = view.heads_of + book * view.lookups * view.joined;
    for (int64_t n = 0; n < view.lookups; ++n) {
        const int64_t first = (book * view.search.entries + indices[n]) * view.joined;
        for (int64_t j = 0; j < view.joined; ++j, ++heads) {
            const float scale = TYPE == KeyType::int8 ? from_fp16(view.state_scales[first + j]) : 1.0f;
            read_state<TYPE, WIDTH>(rows + (first + j) * view.head_dim, scale, view.head_dim, states + *heads * view.head_dim);
            log_z[*heads] = view.log_z[first + j];
        }
    }
}

template <KeyType TYPE, int WIDTH>
TREADLE_INLINE bool find_states(const EntriesView& view, const QueriesView& asked, const EntriesWorkspace& space, const FoundStates& found) {
    const int64_t at_once = tokens_at_once(view), all_lookups = view.books * view.lookups, width = view.heads * view.head_dim;
    for (int64_t first = 0; first < asked.count; first += at_once) {
        const int64_t tokens = std::min(at_once, asked.count - first);
        for (int64_t book = 0; book < view.books; ++book) {
            for (int64_t t = 0; t < tokens; ++t) {
                const int64_t place = asked.places == nullptr ? first + t : asked.places[first + t];
                for (int64_t n = 0; n < view.lookups; ++n) {
                    make_key<WIDTH>(view, asked.queries + place * asked.stride, view.heads_of + (book * view.lookups + n) * view.joined,
                                    space.keys + (t * view.lookups + n) * view.search.dim);
                }
            }
            const int64_t lookups = tokens * view.lookups;
            nearest(codebook(view.search, book), space.keys, lookups, space.lists, space.indices, space.dots);
            if (std::find(space.indices, space.indices + lookups, -1) != space.indices + lookups) return false;
            for (int64_t t = 0; t < tokens; ++t) {
                const int64_t token = first + t;
                take_rows<TYPE, WIDTH>(view, book, space.indices + t * view.lookups, found.states + token * width, found.log_z + token * view.heads);
                for (int64_t n = 0; n < view.lookups; ++n) {
                    const float cosine = space.dots[t * view.lookups + n];
                    const int64_t at = token * all_lookups + book * view.lookups + n;
                    found.cosines[at] = cosine;
                    found.outside[at] = cosine < view.thresholds[book];
                }
            }
        }
    }
    return true;
}

template <int WIDTH>
TREADLE_INLINE bool find_any_states(const EntriesView& view, const QueriesView& asked, const EntriesWorkspace& space, const FoundStates& found) {
    switch (view.search.type) {
        case KeyType::f32: return find_states<KeyType::f32, WIDTH>(view, asked, space, found);
        case KeyType::bf16: return find_states<KeyType::bf16, WIDTH>(view, asked, space, found);
        case KeyType::int8: return find_states<KeyType::int8, WIDTH>(view, asked, space, found);
    }
    return false;
}

inline bool entry_states_baseline(const EntriesView& view, const QueriesView& asked, const EntriesWorkspace& space, const FoundStates& found) {
    return find_any_states<4>(view, asked, space, found);
}

TREADLE_TARGET("avx2,fma")
inline bool entry_states_avx2(const EntriesView& view, const QueriesView& asked, const EntriesWorkspace& space, const FoundStates& found) {
    return find_any_states<8>(view, asked, space, found);
}

TREADLE_TARGET("avx512f,avx512dq,avx512vl,fma")
inline bool entry_states_avx512(const EntriesView& view, const QueriesView& asked, const EntriesWorkspace& space, const FoundStates& found) {
    return find_any_states<16>(view, asked, space, found);
}

}  // namespace detail

// What `asked` finds; false where no product of a lookup is a number, and what was written is then undefined. The views were checked by
// the caller; what is written overlaps nothing that is read.
inline bool entry_states(const EntriesView& view, const QueriesView& asked, const EntriesWorkspace& space, const FoundStates& found) {
    if (detail::cpu_has_avx512()) return detail::entry_states_avx512(view, asked, space, found);
    if (detail::cpu_has_avx2()) return detail::entry_states_avx2(view, asked, space, found);
    return detail::entry_states_baseline(view, asked, space, found);
}

// Merges attention states over other keys into those of rows places[i] (nullptr: i) of a [.., heads, dim] and log_z [.., heads], in place.
// log Z of -inf: over no keys, which changes nothing.
inline void merge_states(int64_t heads, int64_t dim, const int64_t* places, int64_t count, const float* other, const float* other_log_z, float* a,
                         float* log_z) {
    for (int64_t i = 0; i < count * heads; ++i, other += dim) {
        const int64_t at = places == nullptr ? i : places[i / heads] * heads + i % heads;
        const float theirs = other_log_z[i];
        if (theirs == -std::numeric_limits<float>::infinity()) continue;
        // Only the difference counts, and near 0 it is exact: log Z of 1e4 is rounded to 1e-3, its sum with another too.
        const float difference = theirs - log_z[at];
        const float share = 1.0f / (1.0f + std::exp(-difference)), rest = 1.0f / (1.0f + std::exp(difference));
        float* const mine = a + at * dim;
        for (int64_t c = 0; c < dim; ++c) mine[c] = mine[c] * rest + other[c] * share;
        log_z[at] = std::max(log_z[at], theirs) + std::log1p(std::exp(-std::fabs(difference)));
    }
}

}  // namespace treadle::kernels
