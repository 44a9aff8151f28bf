// What every binding file needs: arrays of one exact dtype, and a check that speaks Python.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <type_traits>

#include "../include/treadle/kernels/guard.hpp"
#include "../include/treadle/kernels/products.hpp"

template <typename T>
using Array = pybind11::array_t<T, pybind11::array::c_style>;

inline void require(bool condition, const char* message) {
    if (!condition) throw std::invalid_argument(message);
}

// What a checked loop answers; 0 and above: the place of an id out of range.
constexpr int64_t DONE = -1, UNREADABLE = -2, REFUSED = -3, UNKNOWN_TOKEN = -4, NOTHING_FOUND = -5;

// An array of this kind ('b', 'i', 'u' or 'f') and item size in this machine's byte order, C-contiguous, aligned, writeable where asked:
// what a hot path checks itself, and leaves to Python to complain about.
inline bool is_array(const pybind11::handle& object, char kind, pybind11::ssize_t item_bytes, bool writeable = false) {
    if (!pybind11::isinstance<pybind11::array>(object)) return false;
    const auto array = pybind11::reinterpret_borrow<pybind11::array>(object);
    constexpr int NEEDED = int{pybind11::array::c_style} | int{pybind11::detail::npy_api::NPY_ARRAY_ALIGNED_};
    if ((array.flags() & NEEDED) != NEEDED || (writeable && !array.writeable())) return false;
    const pybind11::dtype type = array.dtype();
    return type.kind() == kind && type.itemsize() == item_bytes && (type.byteorder() == '=' || type.byteorder() == '|');
}

// The same for bools or whole numbers of type T; numpy has two names for most sizes.
template <typename T>
bool is_exact(const pybind11::handle& object, bool writeable = false) {
    constexpr char KIND = std::is_same_v<T, bool> ? 'b' : std::is_signed_v<T> ? 'i' : 'u';
    return is_array(object, KIND, sizeof(T), writeable);
}

// noconvert: an array of another dtype or layout is refused, never copied behind the caller's back
inline pybind11::arg exact(const char* name) { return pybind11::arg(name).noconvert(); }

// An array as a guard wants it; nothing for one that is not there.
inline treadle::kernels::MappedBytes bytes_of(const pybind11::array& array) { return {array.data(), static_cast<size_t>(array.nbytes())}; }

// What the numbers of a codebook are; nullopt: nothing that a search knows.
inline std::optional<treadle::kernels::KeyType> key_type(const pybind11::object& keys) {
    if (is_array(keys, 'f', 4)) return treadle::kernels::KeyType::f32;
    if (is_array(keys, 'u', 2)) return treadle::kernels::KeyType::bf16;
    if (is_array(keys, 'i', 1)) return treadle::kernels::KeyType::int8;
    return std::nullopt;
}
