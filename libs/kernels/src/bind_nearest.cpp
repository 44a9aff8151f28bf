// Python's door to the nearest entry: one codebook, or several that lie one after the other.
#include <algorithm>
#include <cstring>
#include <optional>
#include <vector>

#include "../include/treadle/kernels/guard.hpp"
#include "../include/treadle/kernels/nearest.hpp"
#include "arrays.hpp"

namespace py = pybind11;
namespace tk = treadle::kernels;

namespace {

constexpr int64_t HOLD_PRODUCTS = 1 << 16;  // some microseconds: too short to let go of the GIL

struct Arrays {
    py::array queries, keys, key_scales, list_keys, list_starts, index, dot;  // those that are not given are empty
    int64_t books, count;
    tk::NearestView view;  // of the first codebook
};

py::array given(const py::object& array) { return array.is_none() ? py::array() : py::reinterpret_borrow<py::array>(array); }

bool has_shape(const py::array& array, const py::array& like, int64_t rows, int64_t columns) {
    const py::ssize_t leading = like.ndim() - 2;  // codebooks, where there are any
    if (array.ndim() != leading + 1 + (columns >= 0)) return false;
    if (leading == 1 && array.shape(0) != like.shape(0)) return false;
    return array.shape(leading) == rows && (columns < 0 || array.shape(leading + 1) == columns);
}

// nullopt: an argument is not what is documented; what `list_starts` says is not looked at here.
std::optional<Arrays> read_arrays(const py::object& queries, const py::object& keys, const py::object& key_scales, const py::object& list_keys,
                                  const py::object& list_starts, int64_t lists_probed, const py::object& index, const py::object& dot) {
    const auto type = key_type(keys);
    if (!type || !is_array(queries, 'f', 4) || !is_array(index, 'i', 4, true) || !is_array(dot, 'f', 4, true)) return std::nullopt;
    if (key_scales.is_none() == (*type == tk::KeyType::int8) || (!key_scales.is_none() && !is_array(key_scales, 'f', 2))) return std::nullopt;
    if (list_keys.is_none() != list_starts.is_none() || lists_probed < 1) return std::nullopt;
    if (!list_keys.is_none() && (!is_array(list_keys, 'f', 4) || !is_array(list_starts, 'i', 4))) return std::nullopt;
    Arrays arrays{given(queries), given(keys), given(key_scales), given(list_keys), given(list_starts), given(index), given(dot), 1, 0, {}};
    const py::ssize_t axes = arrays.keys.ndim();
    if ((axes != 2 && axes != 3) || arrays.queries.ndim() != axes) return std::nullopt;
    if (axes == 3) arrays.books = arrays.keys.shape(0);
    arrays.count = arrays.queries.shape(axes - 2);
    const int64_t entries = arrays.keys.shape(axes - 2), dim = arrays.keys.shape(axes - 1);
    if (entries < 1 || entries > tk::ENTRIES_MAX || dim < 1 || dim > tk::KEY_DIM_MAX) return std::nullopt;
    if (!has_shape(arrays.queries, arrays.keys, arrays.count, dim) || !has_shape(arrays.index, arrays.keys, arrays.count, -1) ||
        !has_shape(arrays.dot, arrays.keys, arrays.count, -1)) {
        return std::nullopt;
    }
    if (!key_scales.is_none() && !has_shape(arrays.key_scales, arrays.keys, entries, -1)) return std::nullopt;
    int64_t lists = 0;
    if (!list_keys.is_none()) {
        if (arrays.list_keys.ndim() != axes) return std::nullopt;
        lists = arrays.list_keys.shape(axes - 2);
        if (lists < 1 || lists > tk::LISTS_MAX) return std::nullopt;
        if (!has_shape(arrays.list_keys, arrays.keys, lists, dim) || !has_shape(arrays.list_starts, arrays.keys, lists + 1, -1)) return std::nullopt;
    }
    const auto* const scales = key_scales.is_none() ? nullptr : static_cast<const uint16_t*>(arrays.key_scales.data());
    arrays.view = {*type, static_cast<const std::byte*>(arrays.keys.data()), scales, entries, dim, nullptr, nullptr, lists, lists_probed};
    if (lists != 0) arrays.view.list_keys = static_cast<const float*>(arrays.list_keys.data());
    return arrays;
}

// The starts of all codebooks, copied: a file that is written to meanwhile must not move a scan out of its keys. Empty: they do not fit,
// or could not be read.
std::vector<int32_t> copied_starts(const Arrays& arrays, bool& readable) {
    const int64_t each = arrays.view.lists + 1;
    std::vector<int32_t> starts(static_cast<size_t>(arrays.books * each));
    const auto bytes = static_cast<size_t>(arrays.list_starts.nbytes());
    const void* const source = arrays.list_starts.data();
    int32_t* const target = starts.data();
    readable = tk::guarded(source, bytes, [=] { std::memcpy(target, source, bytes); });
    for (int64_t book = 0; readable && book < arrays.books; ++book) {
        if (!tk::lists_fit(target + book * each, arrays.view.lists, arrays.view.entries)) return {};
    }
    return starts;
}

int64_t nearest(const py::object& queries, const py::object& keys, const py::object& key_scales, const py::object& list_keys,
                const py::object& list_starts, int64_t lists_probed, const py::object& index, const py::object& dot) {
    auto arrays = read_arrays(queries, keys, key_scales, list_keys, list_starts, lists_probed, index, dot);
    if (!arrays) return REFUSED;
    const tk::NearestView& all = arrays->view;
    const int64_t lists = all.lists, count = arrays->count, books = arrays->books;
    std::vector<int32_t> starts;
    if (lists != 0) {
        bool readable = true;
        starts = copied_starts(*arrays, readable);
        if (!readable) return UNREADABLE;
        if (starts.empty() && books != 0) return REFUSED;
    }
    std::vector<uint64_t> wanted(static_cast<size_t>(lists)), ranked(static_cast<size_t>(lists));
    const tk::NearestWorkspace space{wanted.data(), ranked.data()};
    const auto* const asked = static_cast<const float*>(arrays->queries.data());
    auto* const indices = static_cast<int32_t*>(arrays->index.mutable_data());
    auto* const dots = static_cast<float*>(arrays->dot.mutable_data());
    tk::NearestView first = all;
    first.list_starts = starts.data();
    const tk::MappedBytes mapped[] = {bytes_of(arrays->keys), bytes_of(arrays->key_scales), bytes_of(arrays->list_keys)};
    const auto search = [&]() -> int64_t {
        const bool read = tk::guarded_all(mapped, std::size(mapped), [&] {
            for (int64_t book = 0; book < books; ++book) {
                tk::nearest(tk::codebook(first, book), asked + book * count * all.dim, count, space, indices + book * count, dots + book * count);
            }
        });
        if (!read) return UNREADABLE;
        return std::find(indices, indices + books * count, -1) == indices + books * count ? DONE : NOTHING_FOUND;
    };
    const int64_t scanned = lists == 0 ? all.entries : lists + all.entries / lists * lists_probed;
    if (books * count * scanned * all.dim <= HOLD_PRODUCTS) return search();
    const py::gil_scoped_release released;
    return search();
}

}  // namespace

void bind_nearest(py::module_& module) {
    module.def("nearest", &nearest, py::arg("queries"), py::arg("keys"), py::arg("key_scales"), py::arg("list_keys"), py::arg("list_starts"),
               py::arg("lists_probed"), py::arg("index"), py::arg("dot"));
}
