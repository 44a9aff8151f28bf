// Heads of tokens as a forward has them, places among tokens, and shapes: what bindings of attention need.
#pragma once

#include <algorithm>
#include <initializer_list>
#include <optional>

#include "arrays.hpp"

using Shape = std::initializer_list<pybind11::ssize_t>;

inline bool has_shape(const pybind11::array& array, const Shape& shape) {
    return array.ndim() == static_cast<pybind11::ssize_t>(shape.size()) && std::equal(shape.begin(), shape.end(), array.shape());
}

inline pybind11::array given(const pybind11::object& array) {
    return array.is_none() ? pybind11::array() : pybind11::reinterpret_borrow<pybind11::array>(array);
}

// Token t has its heads at `numbers` + t * stride.
struct TokenHeads {
    const float* numbers;
    int64_t stride;
    int64_t tokens;
};

// Heads [T, heads, dim] fp32 with dense heads, tokens at any distance: a part of a wider array will do. nullopt: it is something else.
inline std::optional<TokenHeads> heads_of_tokens(const pybind11::object& object, int64_t heads, int64_t dim) {
    if (!pybind11::isinstance<pybind11::array>(object)) return std::nullopt;
    const auto array = pybind11::reinterpret_borrow<pybind11::array>(object);
    const pybind11::dtype type = array.dtype();
    if (type.kind() != 'f' || type.itemsize() != 4 || (type.byteorder() != '=' && type.byteorder() != '|')) return std::nullopt;
    if ((array.flags() & pybind11::detail::npy_api::NPY_ARRAY_ALIGNED_) == 0 || array.ndim() != 3) return std::nullopt;
    if (array.shape(1) != heads || array.shape(2) != dim) return std::nullopt;
    if (array.shape(0) == 0) return TokenHeads{nullptr, 0, 0};
    const int64_t word = type.itemsize();
    const bool dense = (dim == 1 || array.strides(2) == word) && (heads == 1 || array.strides(1) == word * dim);
    if (!dense || array.strides(0) < 0 || array.strides(0) % word != 0) return std::nullopt;
    return TokenHeads{static_cast<const float*>(array.data()), array.strides(0) / word, array.shape(0)};
}

// begin nullptr: places 0 to count.
struct Places {
    const int64_t* begin;
    int64_t count;
};

// The places of rows among `total`, None: all of them. nullopt: they are no int64 [n], or one lies outside.
inline std::optional<Places> places_among(const pybind11::object& rows, int64_t total) {
    if (rows.is_none()) return Places{nullptr, total};
    if (!is_exact<int64_t>(rows)) return std::nullopt;
    const auto array = pybind11::reinterpret_borrow<pybind11::array>(rows);
    if (array.ndim() != 1) return std::nullopt;
    const Places places{static_cast<const int64_t*>(array.data()), array.size()};
    const bool inside = std::all_of(places.begin, places.begin + places.count, [total](int64_t place) { return 0 <= place && place < total; });
    return inside ? std::optional(places) : std::nullopt;
}
