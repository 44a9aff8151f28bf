// What every binding file shares: borrowed arrays, views of plans and windows, and the doors that the module opens.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "rows.hpp"
#include "versions.hpp"
#include "treadle/kernels/windows.hpp"

namespace treadle::dataplane {

namespace py = pybind11;

inline constexpr int64_t SIGNAL_CHECK_NS = 50'000'000;  // how long a wait may keep Ctrl-C waiting

// A C-contiguous array of exactly T, never converted: a converted copy would not be the caller's memory.
template <typename T>
py::array borrow(const py::handle& object, const char* name) {
    if (!py::isinstance<py::array_t<T, py::array::c_style>>(object))
        throw py::type_error(std::string(name) + ": a C-contiguous array of another dtype was expected");
    return py::reinterpret_borrow<py::array>(object);
}

template <typename T>
const T* pointer(const py::handle& object, const char* name) {
    return object.is_none() ? nullptr : static_cast<const T*>(borrow<T>(object, name).data());
}

inline kernels::Family family_of(const std::string& name) {
    if (name == "engram-demo") return kernels::Family::demo;
    if (name == "deepseek-v4.1") return kernels::Family::deepseek_v41;
    if (name == "qwen-ple") return kernels::Family::qwen_ple;
    throw py::value_error("family: " + name);
}

inline kernels::HashPlanView view_of_plan(const py::object& plan) {
    kernels::HashPlanView view{};
    view.family = family_of(plan.attr("family").cast<std::string>());
    view.order_max = plan.attr("order_max").cast<int>();
    const py::array orders = borrow<int32_t>(plan.attr("orders"), "orders");
    view.order_count = static_cast<int>(orders.size());
    view.orders = static_cast<const int32_t*>(orders.data());
    view.heads = plan.attr("heads").cast<int>();
    view.multipliers = pointer<uint64_t>(plan.attr("multipliers"), "multipliers");
    view.primes = pointer<int64_t>(plan.attr("primes"), "primes");
    view.offsets = pointer<int64_t>(plan.attr("offsets"), "offsets");
    view.pad = plan.attr("pad").cast<int64_t>();
    view.eos = plan.attr("eos").cast<int64_t>();
    const py::object token_map = plan.attr("token_map");
    view.token_map = pointer<int32_t>(token_map, "token_map");
    view.token_map_size = plan.attr("token_limit").cast<int64_t>();
    return view;
}

inline kernels::WindowsView view_of_windows(const py::object& windows) {
    kernels::WindowsView view{};
    const py::array tokens = borrow<int64_t>(windows.attr("tokens"), "tokens");
    const py::array lookback = borrow<int64_t>(windows.attr("lookback"), "lookback");
    view.tokens = static_cast<const int64_t*>(tokens.data());
    view.token_count = tokens.size();
    view.starts = pointer<int32_t>(windows.attr("starts"), "starts");
    view.request_count = lookback.shape(0);
    view.lookback = static_cast<const int64_t*>(lookback.data());
    view.lookback_columns = lookback.shape(1);
    view.dead = pointer<bool>(windows.attr("dead"), "dead");
    view.lookback_dead = pointer<bool>(windows.attr("lookback_dead"), "lookback_dead");
    return view;
}

// Freed with the GIL held: by whoever looks at the ended ticket first, or by the next submission.
inline std::shared_ptr<void> hold(py::tuple objects) { return std::make_shared<py::tuple>(std::move(objects)); }

// Rows of a table that a caller gave: an array [N, row_bytes], which the caller keeps alive, or a RowStore.
inline RowStoreRef rows_of(const py::object& table) {
    if (py::isinstance<RowStore>(table)) return table.cast<RowStoreRef>();
    const py::array rows = borrow<uint8_t>(table, "table");
    return std::make_shared<MemoryRows>(static_cast<const std::byte*>(rows.data()), rows.shape(0), rows.shape(1));
}

// int64 [n, 2] of [first, last), checked by the Python face; None: all rows are held.
inline std::vector<RowRange> ranges_of(const py::object& held) {
    std::vector<RowRange> ranges;
    if (held.is_none()) return ranges;
    const py::array pairs = borrow<int64_t>(held, "held");
    const auto* at = static_cast<const int64_t*>(pairs.data());
    for (py::ssize_t i = 0; i < pairs.shape(0); ++i) ranges.push_back({at[2 * i], at[2 * i + 1]});
    return ranges;
}

// A sha256.
inline Digest digest_of(const std::string& bytes, const char* name) {
    Digest digest;
    if (bytes.size() != digest.size()) throw py::value_error(std::string(name) + ": 32 bytes expected");
    std::memcpy(digest.data(), bytes.data(), digest.size());
    return digest;
}

void bind_rows(py::module_& module);
void bind_queue(py::module_& module);
void bind_tenants(py::module_& module);
void bind_versions(py::module_& module);
void bind_ring(py::module_& module);
void bind_cache(py::module_& module);
void bind_disk(py::module_& module);
void bind_socket(py::module_& module);

}  // namespace treadle::dataplane
