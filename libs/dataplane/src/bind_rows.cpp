// Python's door to row stores: where the rows of one table lie.
#include <vector>

#include "bindings.hpp"

namespace treadle::dataplane {
namespace {

// int64 [n, 2] of [first, last), checked by the Python face; None: all rows are held.
std::vector<RowRange> ranges_of(const py::object& held) {
    std::vector<RowRange> ranges;
    if (held.is_none()) return ranges;
    const py::array pairs = borrow<int64_t>(held, "held");
    const auto* at = static_cast<const int64_t*>(pairs.data());
    for (py::ssize_t i = 0; i < pairs.shape(0); ++i) ranges.push_back({at[2 * i], at[2 * i + 1]});
    return ranges;
}

RowStoreRef memory_rows(const py::object& table, const py::object& held) {
    const py::array rows = borrow<uint8_t>(table, "table");
    return std::make_shared<MemoryRows>(static_cast<const std::byte*>(rows.data()), rows.shape(0), rows.shape(1), ranges_of(held));
}

}  // namespace

void bind_rows(py::module_& module) {
    py::class_<RowStore, RowStoreRef>(module, "RowStore")
        .def_readonly("row_count", &RowStore::row_count)
        .def_readonly("row_bytes", &RowStore::row_bytes);
    module.def("memory_rows", &memory_rows, py::arg("table"), py::arg("held"), py::keep_alive<0, 1>());
}

}  // namespace treadle::dataplane
