// The entry whose key has the largest dot product with a query: all of them, or those of the best lists only, scanned where they lie.
//
// Keys are what is read most, so each is read once for several queries: a tile holds the sums of some queries times four keys in
// registers, and keys of bf16 or int8 are widened on their way into one. With two levels the queries that want a list are gathered
// first, and lists are scanned in rising order, so that of equal entries the first is found, whatever the order of the lists' scores.
//
// Tried on one AMD EPYC (Zen 4, under KVM, other work on its cores: best of 60), 8 codebooks, 2 queries each, keys of 256, 16 lists probed,
// microseconds for 4K / 16K entries in 64 / 128 lists that no cache holds:
//   fp32 without the prefetch of the next four keys 1520 / 3840, with it (kept) 1180 / 3280, of the four after those 1380 / 3250
//   int8 likewise 196 / 770, 192 / 605, 196 / 710
//   int8 keys widened by the compiler's code 4 times as slow as fp32 ones, by one instruction faster
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>

#include "dequantise.hpp"
#include "products.hpp"
#include "target.hpp"

namespace treadle::kernels {

inline constexpr int64_t KEY_DIM_MAX = 1 << 20, ENTRIES_MAX = 1 << 30, LISTS_MAX = 1 << 20;
inline constexpr int64_t QUERIES_AT_ONCE = 64;  // one bit each in the word that says who wants a list

// One codebook: `entries` keys of `dim` numbers; int8 keys have a scale each (fp16 bits), others nullptr. lists: 0, or so many list keys
// and lists + 1 starts that rise from 0 to `entries`.
struct NearestView {
    KeyType type;
    const std::byte* keys;
    const uint16_t* key_scales;
    int64_t entries;
    int64_t dim;
    const float* list_keys;
    const int32_t* list_starts;
    int64_t lists;
    int64_t lists_probed;
};

// Codebook `book` of several that lie one after the other, all of the first one's sizes.
inline NearestView codebook(const NearestView& first, int64_t book) {
    constexpr int64_t WORD_BYTES[] = {4, 2, 1};
    NearestView view = first;
    view.keys += book * first.entries * first.dim * WORD_BYTES[static_cast<int>(first.type)];
    if (first.key_scales != nullptr) view.key_scales += book * first.entries;
    if (first.lists != 0) view.list_keys += book * first.lists * first.dim;
    if (first.lists != 0) view.list_starts += book * (first.lists + 1);
    return view;
}

// What a search writes while it runs: `lists` numbers each, where there are lists.
struct NearestWorkspace {
    uint64_t* wanted;  // bit q: query q of the block scans this list
    uint64_t* ranked;
};

namespace detail {

TREADLE_INLINE void keep_larger(float product, int64_t entry, float& dot, int32_t& index) {
    if (product > dot) {  // false for NaN, and for an equal one that comes later
        dot = product;
        index = static_cast<int32_t>(entry);
    }
}

// Entries [begin, end) for as many queries at once; dots and indices by the query's place in its block.
template <KeyType TYPE, int WIDTH, int QUERIES>
TREADLE_INLINE void scan_for(const NearestView& view, int64_t begin, int64_t end, const float* const* queries, const int* places, float* dots,
                             int32_t* indices) {
    const auto* const keys = reinterpret_cast<const typename KeyWord<TYPE>::Word*>(view.keys);
    int64_t entry = begin;
    for (; entry + TILE_KEYS <= end; entry += TILE_KEYS) {
        Four products[QUERIES];
        products_of_four<TYPE, WIDTH, QUERIES>(queries, keys + entry * view.dim, view.dim, products);
        if constexpr (TYPE == KeyType::int8) {
            Four scales{};
            for (int k = 0; k < TILE_KEYS; ++k) scales[k] = from_fp16(view.key_scales[entry + k]);
            for (int q = 0; q < QUERIES; ++q) products[q] *= scales;
        }
        for (int q = 0; q < QUERIES; ++q) {
            for (int k = 0; k < TILE_KEYS; ++k) keep_larger(products[q][k], entry + k, dots[places[q]], indices[places[q]]);
        }
    }
    for (; entry < end; ++entry) {
        const float scale = TYPE == KeyType::int8 ? from_fp16(view.key_scales[entry]) : 1.0f;
        for (int q = 0; q < QUERIES; ++q) {
            const float product = product_of_one<TYPE, WIDTH>(queries[q], keys + entry * view.dim, view.dim);
            keep_larger(product * scale, entry, dots[places[q]], indices[places[q]]);
        }
    }
}

// Entries [begin, end) for the queries of the block whose bit is set.
template <KeyType TYPE, int WIDTH>
TREADLE_INLINE void scan(const NearestView& view, int64_t begin, int64_t end, const float* block, uint64_t wanted, float* dots, int32_t* indices) {
    constexpr int TILE_QUERIES = WIDTH == 16 ? 4 : 2;  // more sums than registers would go through memory
    const float* queries[TILE_QUERIES];
    int places[TILE_QUERIES];
    while (wanted != 0) {
        int count = 0;
        for (; count < TILE_QUERIES && wanted != 0; ++count, wanted &= wanted - 1) {
            places[count] = std::countr_zero(wanted);
            queries[count] = block + places[count] * view.dim;
        }
        switch (count) {
            case 1: scan_for<TYPE, WIDTH, 1>(view, begin, end, queries, places, dots, indices); break;
            case 2: scan_for<TYPE, WIDTH, 2>(view, begin, end, queries, places, dots, indices); break;
            default:
                if constexpr (TILE_QUERIES == 4) {
                    if (count == 3) {
                        scan_for<TYPE, WIDTH, 3>(view, begin, end, queries, places, dots, indices);
                    } else {
                        scan_for<TYPE, WIDTH, 4>(view, begin, end, queries, places, dots, indices);
                    }
                }
        }
    }
}

// Rises as the float does, so that whole numbers can be sorted in its place; NaN lowest, as -inf.
TREADLE_INLINE uint32_t rank_of(float score) {
    const auto bits = std::bit_cast<uint32_t>(score == score ? score + 0.0f : -std::numeric_limits<float>::infinity());  // -0 is 0
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// Sets the bit of `query` in `wanted` for its best lists: larger scores first, of equal ones the first list, none without entries.
template <int WIDTH>
TREADLE_INLINE void choose_lists(const NearestView& view, const float* query, int place, const NearestWorkspace& space) {
    int64_t filled = 0;
    const auto rank = [&](float score, int64_t list) TREADLE_LAMBDA_INLINE {
        if (view.list_starts[list] == view.list_starts[list + 1]) return;
        space.ranked[filled++] = static_cast<uint64_t>(rank_of(score)) << 32 | ~static_cast<uint32_t>(list);
    };
    int64_t list = 0;
    for (; list + TILE_KEYS <= view.lists; list += TILE_KEYS) {
        Four scores;
        products_of_four<KeyType::f32, WIDTH, 1>(&query, view.list_keys + list * view.dim, view.dim, &scores);
        for (int k = 0; k < TILE_KEYS; ++k) rank(scores[k], list + k);
    }
    for (; list < view.lists; ++list) rank(product_of_one<KeyType::f32, WIDTH>(query, view.list_keys + list * view.dim, view.dim), list);
    const int64_t probed = std::min(view.lists_probed, filled);
    if (probed < filled) std::nth_element(space.ranked, space.ranked + probed, space.ranked + filled, std::greater<uint64_t>());
    for (int64_t i = 0; i < probed; ++i) space.wanted[~static_cast<uint32_t>(space.ranked[i])] |= uint64_t{1} << place;
}

template <KeyType TYPE, int WIDTH>
TREADLE_INLINE void search(const NearestView& view, const float* queries, int64_t count, const NearestWorkspace& space, int32_t* indices, float* dots) {
    for (int64_t first = 0; first < count; first += QUERIES_AT_ONCE, queries += QUERIES_AT_ONCE * view.dim) {
        const int64_t block = std::min(QUERIES_AT_ONCE, count - first);
        std::fill_n(indices + first, block, -1);
        std::fill_n(dots + first, block, -std::numeric_limits<float>::infinity());
        if (view.lists == 0) {
            scan<TYPE, WIDTH>(view, 0, view.entries, queries, ~uint64_t{0} >> (QUERIES_AT_ONCE - block), dots + first, indices + first);
            continue;
        }
        std::fill_n(space.wanted, view.lists, 0);
        for (int q = 0; q < block; ++q) choose_lists<WIDTH>(view, queries + q * view.dim, q, space);
        for (int64_t list = 0; list < view.lists; ++list) {
            if (space.wanted[list] == 0) continue;
            scan<TYPE, WIDTH>(view, view.list_starts[list], view.list_starts[list + 1], queries, space.wanted[list], dots + first, indices + first);
        }
    }
}

template <int WIDTH>
TREADLE_INLINE void search_any(const NearestView& view, const float* queries, int64_t count, const NearestWorkspace& space, int32_t* indices,
                               float* dots) {
    switch (view.type) {
        case KeyType::f32: return search<KeyType::f32, WIDTH>(view, queries, count, space, indices, dots);
        case KeyType::bf16: return search<KeyType::bf16, WIDTH>(view, queries, count, space, indices, dots);
        case KeyType::int8: return search<KeyType::int8, WIDTH>(view, queries, count, space, indices, dots);
    }
}

inline void nearest_baseline(const NearestView& view, const float* queries, int64_t count, const NearestWorkspace& space, int32_t* indices,
                             float* dots) {
    search_any<4>(view, queries, count, space, indices, dots);
}

TREADLE_TARGET("avx2,fma")
inline void nearest_avx2(const NearestView& view, const float* queries, int64_t count, const NearestWorkspace& space, int32_t* indices, float* dots) {
    search_any<8>(view, queries, count, space, indices, dots);
}

TREADLE_TARGET("avx512f,avx512dq,avx512vl,fma")
inline void nearest_avx512(const NearestView& view, const float* queries, int64_t count, const NearestWorkspace& space, int32_t* indices,
                           float* dots) {
    search_any<16>(view, queries, count, space, indices, dots);
}

}  // namespace detail

// Whether the starts [lists + 1] rise from 0 to `entries`, so that a scan stays inside the keys.
inline bool lists_fit(const int32_t* starts, int64_t lists, int64_t entries) {
    return starts[0] == 0 && starts[lists] == entries && std::is_sorted(starts, starts + lists + 1);
}

// For each of `count` queries [count, dim] the entry with the largest product, the first of equal ones, and that product; index -1
// where no product is a number. The view was checked by the caller; what is written overlaps nothing that is read.
inline void nearest(const NearestView& view, const float* queries, int64_t count, const NearestWorkspace& space, int32_t* indices, float* dots) {
    if (detail::cpu_has_avx512()) return detail::nearest_avx512(view, queries, count, space, indices, dots);
    if (detail::cpu_has_avx2()) return detail::nearest_avx2(view, queries, count, space, indices, dots);
    return detail::nearest_baseline(view, queries, count, space, indices, dots);
}

}  // namespace treadle::kernels
