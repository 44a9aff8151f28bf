// What every binding file needs: arrays of one exact dtype, and a check that speaks Python.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <stdexcept>
#include <type_traits>

template <typename T>
using Array = pybind11::array_t<T, pybind11::array::c_style>;

inline void require(bool condition, const char* message) {
    if (!condition) throw std::invalid_argument(message);
}

// An array of bools or whole numbers of type T in this machine's byte order, C-contiguous, aligned, writeable where asked: what a hot path checks
// itself, and leaves to Python to complain about.
template <typename T>
bool is_exact(const pybind11::handle& object, bool writeable = false) {
    if (!pybind11::isinstance<pybind11::array>(object)) return false;
    const auto array = pybind11::reinterpret_borrow<pybind11::array>(object);
    constexpr int NEEDED = int{pybind11::array::c_style} | int{pybind11::detail::npy_api::NPY_ARRAY_ALIGNED_};
    if ((array.flags() & NEEDED) != NEEDED || (writeable && !array.writeable())) return false;
    constexpr char KIND = std::is_same_v<T, bool> ? 'b' : std::is_signed_v<T> ? 'i' : 'u';  // numpy has two names for most sizes
    const pybind11::dtype type = array.dtype();
    return type.kind() == KIND && type.itemsize() == sizeof(T) && (type.byteorder() == '=' || type.byteorder() == '|');
}

// noconvert: an array of another dtype or layout is refused, never copied behind the caller's back
inline pybind11::arg exact(const char* name) { return pybind11::arg(name).noconvert(); }
