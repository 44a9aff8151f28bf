// Python's door to the hot-row cache: its writer, its readers, and tables behind it.
#include <cstring>
#include <memory>
#include <string>
#include <utility>

#include "bindings.hpp"
#include "cached_rows.hpp"

namespace treadle::dataplane {
namespace {

using TableTuple = std::pair<int, uint64_t>;  // slot, tag

// Places of the rows that are not there, int64; `out` [n, row_bytes] holds the others.
template <typename Probe>
py::array_t<int64_t> probe(const py::object& rows, const py::object& out, Probe&& run) {
    const py::array ids = borrow<int64_t>(rows, "rows");
    auto* filled = static_cast<std::byte*>(borrow<uint8_t>(out, "out").mutable_data());
    const auto count = static_cast<int64_t>(ids.size());
    py::array_t<int64_t> misses(count);
    int64_t missed;
    {
        const auto* wanted = static_cast<const int64_t*>(ids.data());
        int64_t* places = misses.mutable_data();
        const py::gil_scoped_release nogil;
        missed = run(wanted, count, filled, places);
    }
    misses.resize({missed});
    return misses;
}

TableTuple enter(hot::Cache& cache, const py::bytes& version, int64_t layer) {
    const hot::Table table = cache.enter(digest_of(version, "version"), layer);
    return {table.slot, table.tag};
}

py::array_t<int64_t> probe_as_writer(hot::Cache& cache, TableTuple table, const py::object& rows, const py::object& out) {
    return probe(rows, out, [&](const int64_t* ids, int64_t count, std::byte* filled, int64_t* misses) {
        return cache.probe_and_mark({table.first, table.second}, ids, count, filled, misses);
    });
}

py::array_t<int64_t> probe_as_reader(const hot::Reader& reader, TableTuple table, const py::object& rows, const py::object& out) {
    return probe(rows, out, [&](const int64_t* ids, int64_t count, std::byte* filled, int64_t* misses) {
        return reader.probe({table.first, table.second}, ids, count, filled, misses, false);
    });
}

void insert(hot::Cache& cache, TableTuple table, const py::object& rows, const py::object& bytes) {
    const py::array ids = borrow<int64_t>(rows, "rows");
    const auto* from = static_cast<const std::byte*>(borrow<uint8_t>(bytes, "bytes").data());
    const auto* at = static_cast<const int64_t*>(ids.data());
    const py::ssize_t count = ids.size();
    const py::gil_scoped_release nogil;
    for (py::ssize_t i = 0; i < count; ++i) cache.insert({table.first, table.second}, at[i], from + i * cache.row_bytes());
}

py::dict stats_of(const hot::Cache& cache) {
    py::dict stats;
    stats["bytes"] = cache.bytes();
    stats["rows_max"] = cache.sets() * hot::WAYS;
    stats["hits_total"] = cache.totals().hits.load();
    stats["misses_total"] = cache.totals().misses.load();
    stats["inserted_total"] = cache.totals().inserted.load();
    stats["evicted_total"] = cache.totals().evicted.load();
    return stats;
}

RowStoreRef cached_rows(RowStoreRef inner, std::shared_ptr<hot::Cache> cache, TableTuple table) {
    if (inner->row_bytes != cache->row_bytes()) throw py::value_error("rows of another size than the cache's");
    return std::make_shared<CachedRows>(std::move(inner), std::move(cache), hot::Table{table.first, table.second});
}

}  // namespace

void bind_cache(py::module_& module) {
    py::class_<hot::Cache, std::shared_ptr<hot::Cache>>(module, "HotCache")
        .def(py::init<int64_t, uint64_t>())
        .def_property_readonly("fd", &hot::Cache::fd)
        .def_property_readonly("row_bytes", &hot::Cache::row_bytes)
        .def("enter", &enter)
        .def("find",
             [](const hot::Cache& cache, const py::bytes& version, int64_t layer) {
                 const hot::Table table = cache.find(digest_of(version, "version"), layer);
                 return TableTuple{table.slot, table.tag};
             })
        .def("retire", [](hot::Cache& cache, TableTuple table) { cache.retire({table.first, table.second}); }, py::call_guard<py::gil_scoped_release>())
        .def("probe", &probe_as_writer)
        .def("insert", &insert)
        .def("stats", &stats_of);
    py::class_<hot::Reader>(module, "HotReader")
        .def(py::init<int>())
        .def_property_readonly("row_bytes", &hot::Reader::row_bytes)
        .def("find",
             [](const hot::Reader& reader, const py::bytes& version, int64_t layer) {
                 const hot::Table table = reader.find(digest_of(version, "version"), layer);
                 return TableTuple{table.slot, table.tag};
             })
        .def("serves", [](const hot::Reader& reader, TableTuple table) { return reader.serves({table.first, table.second}); })
        .def("probe", &probe_as_reader);
    module.def("cached_rows", &cached_rows);
}

}  // namespace treadle::dataplane
