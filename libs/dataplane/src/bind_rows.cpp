// Python's door to row stores: where the rows of one table lie.
#include <memory>
#include <utility>

#include "bindings.hpp"
#include "dedup_rows.hpp"

namespace treadle::dataplane {
namespace {

RowStoreRef memory_rows(const py::object& table, const py::object& held) {
    const py::array rows = borrow<uint8_t>(table, "table");
    return std::make_shared<MemoryRows>(static_cast<const std::byte*>(rows.data()), rows.shape(0), rows.shape(1), ranges_of(held));
}

// The number of a fault; 0: `out` holds the rows.
int gather(RowStore& store, const py::object& rows, const py::object& out) {
    const py::array ids = borrow<int64_t>(rows, "rows");
    py::array filled = borrow<uint8_t>(out, "out");
    if (filled.size() != ids.size() * store.row_bytes) throw py::value_error("out: rows of another number or size");
    const auto* wanted = static_cast<const int64_t*>(ids.data());
    auto* to = static_cast<std::byte*>(filled.mutable_data());
    const auto count = static_cast<int64_t>(ids.size());
    const py::gil_scoped_release nogil;
    if (store.first_bad(wanted, count) >= 0) return static_cast<int>(Fault::out_of_range);
    return static_cast<int>(store.gather(wanted, count, to));
}

}  // namespace

void bind_rows(py::module_& module) {
    py::class_<RowStore, RowStoreRef>(module, "RowStore")
        .def_readonly("row_count", &RowStore::row_count)
        .def_readonly("row_bytes", &RowStore::row_bytes)
        .def("gather", &gather);
    module.def("dedup_rows", [](RowStoreRef inner) -> RowStoreRef { return std::make_shared<DedupRows>(std::move(inner)); }, py::keep_alive<0, 1>());
    module.def("memory_rows", &memory_rows, py::arg("table"), py::arg("held"), py::keep_alive<0, 1>());
}

}  // namespace treadle::dataplane
