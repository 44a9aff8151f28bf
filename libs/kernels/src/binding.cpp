// Python's door to the headers: takes arrays of exact dtype, checks that sizes fit together, drops the GIL. No more.
#include <pybind11/stl.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "../include/treadle/kernels/crc32c.hpp"
#include "../include/treadle/kernels/dequantise.hpp"
#include "../include/treadle/kernels/flush.hpp"
#include "../include/treadle/kernels/guard.hpp"
#include "../include/treadle/kernels/lookup.hpp"
#include "arrays.hpp"

namespace py = pybind11;
namespace tk = treadle::kernels;

void bind_decode(py::module_& module);
void bind_dedup(py::module_& module);
void bind_entry_states(py::module_& module);
void bind_nearest(py::module_& module);
void bind_prefetch(py::module_& module);

namespace {

template <typename T>
std::vector<T> copied(const Array<T>& array) {
    return {array.data(), array.data() + array.size()};
}

class Plan {
public:
    Plan(int family, const Array<int32_t>& orders, int heads, const Array<uint64_t>& multipliers, const Array<int64_t>& primes,
         const Array<int64_t>& offsets, int64_t pad, int64_t eos, std::optional<Array<int32_t>> token_map, int64_t token_limit)
        : orders_(copied(orders)), multipliers_(copied(multipliers)), primes_(copied(primes)), offsets_(copied(offsets)),
          token_map_(std::move(token_map)) {
        const auto columns = static_cast<int64_t>(orders_.size()) * heads;
        require(!orders_.empty() && heads >= 1 && columns <= tk::COLUMNS_MAX, "orders x heads");
        require(orders_.front() >= 1 && orders_.back() <= tk::ORDER_MAX && std::is_sorted(orders_.begin(), orders_.end()), "orders");
        require(multipliers_.size() == static_cast<size_t>(orders_.back()), "multipliers");
        require(primes_.size() == static_cast<size_t>(columns) && offsets_.size() == primes_.size(), "primes, offsets");
        require(!token_map_ || token_map_->size() == token_limit, "token_map");
        rows_hashed_ = offsets_.back() + primes_.back();
        view_ = {static_cast<tk::Family>(family), orders_.back(), static_cast<int>(orders_.size()), orders_.data(), heads,
                 multipliers_.data(), primes_.data(), offsets_.data(), pad, eos, token_map_ ? token_map_->data() : nullptr, token_limit};
    }
    Plan(const Plan&) = delete;  // the view points into this object
    Plan& operator=(const Plan&) = delete;

    const tk::HashPlanView& view() const { return view_; }
    int64_t columns() const { return static_cast<int64_t>(primes_.size()); }
    int64_t rows_hashed() const { return rows_hashed_; }

private:
    std::vector<int32_t> orders_;
    std::vector<uint64_t> multipliers_;
    std::vector<int64_t> primes_;
    std::vector<int64_t> offsets_;
    std::optional<Array<int32_t>> token_map_;
    int64_t rows_hashed_;
    tk::HashPlanView view_;
};

constexpr int64_t HOLD_ROWS = 32;  // one token: too short to let go of the GIL, which a busy Python thread gives back only after 5 ms

py::array borrowed(const py::object& array) { return py::reinterpret_borrow<py::array>(array); }

const bool* mask_of(const py::object& mask) { return mask.is_none() ? nullptr : static_cast<const bool*>(borrowed(mask).data()); }

// The arrays of a `Windows`, which checked their values; nullopt if they are others, or reach back less far than the plan.
std::optional<tk::WindowsView> windows_view(const Plan& plan, const py::object& tokens_object, const py::object& starts_object,
                                            const py::object& lookback_object, const py::object& dead, const py::object& lookback_dead) {
    if (!is_exact<int64_t>(tokens_object) || !is_exact<int32_t>(starts_object) || !is_exact<int64_t>(lookback_object)) return std::nullopt;
    const py::array tokens = borrowed(tokens_object), starts = borrowed(starts_object), lookback = borrowed(lookback_object);
    if (tokens.ndim() != 1 || starts.ndim() != 1 || starts.size() < 1 || lookback.ndim() != 2) return std::nullopt;
    const auto* const bounds = static_cast<const int32_t*>(starts.data());
    const int64_t requests = starts.size() - 1;
    if (lookback.shape(0) != requests || lookback.shape(1) < plan.view().order_max - 1 || bounds[requests] != tokens.size()) return std::nullopt;
    const auto fits = [](const py::object& mask, int64_t size) { return mask.is_none() || (is_exact<bool>(mask) && borrowed(mask).size() == size); };
    if (!fits(dead, tokens.size()) || !fits(lookback_dead, lookback.size())) return std::nullopt;
    return tk::WindowsView{static_cast<const int64_t*>(tokens.data()), tokens.size(), bounds, requests,
                           static_cast<const int64_t*>(lookback.data()), lookback.shape(1), mask_of(dead), mask_of(lookback_dead)};
}

int64_t row_ids(const Plan& plan, const py::object& tokens, const py::object& starts, const py::object& lookback, const py::object& dead,
                const py::object& lookback_dead, Array<int64_t>& out) {
    const auto windows = windows_view(plan, tokens, starts, lookback, dead, lookback_dead);
    if (!windows) return REFUSED;
    require(out.size() == windows->token_count * plan.columns(), "out");
    int64_t* const rows = out.mutable_data();
    const py::gil_scoped_release released;
    if (!tk::tokens_in_range(plan.view(), *windows)) return UNKNOWN_TOKEN;
    tk::hash_rows(plan.view(), *windows, 0, windows->token_count, rows);
    return DONE;
}

// Runs `act` without the GIL, unless it takes some microseconds only.
template <class F>
auto without_gil(int64_t rows, F&& act) {
    if (rows <= HOLD_ROWS) return act();
    const py::gil_scoped_release released;
    return act();
}

// Checks its arrays itself: with small batches that is what the time goes into.
int64_t gather_rows(const py::object& table_object, const py::object& rows_object, const py::object& out_object) {
    if (!is_exact<uint8_t>(table_object) || !is_exact<int64_t>(rows_object) || !is_exact<uint8_t>(out_object, true)) return REFUSED;
    const py::array table = borrowed(table_object), rows = borrowed(rows_object);
    py::array out = borrowed(out_object);
    if (table.ndim() != 2 || out.ndim() != rows.ndim() + 1 || !std::equal(rows.shape(), rows.shape() + rows.ndim(), out.shape())) return REFUSED;
    const int64_t row_count = table.shape(0);
    const int64_t row_bytes = table.shape(1);
    if (out.shape(rows.ndim()) != row_bytes || row_bytes < tk::ROW_BYTES_MIN || row_bytes > tk::ROW_BYTES_MAX) return REFUSED;
    const auto* const source = static_cast<const std::byte*>(table.data());
    const auto* const ids = static_cast<const int64_t*>(rows.data());
    auto* const target = static_cast<std::byte*>(out.mutable_data());
    const int64_t count = rows.size();
    return without_gil(count, [=]() -> int64_t {
        const int64_t bad = tk::first_out_of_range(ids, count, row_count);
        if (bad >= 0) return bad;
        const bool read = tk::guarded(source, static_cast<size_t>(row_count * row_bytes), [=] { tk::gather(source, row_bytes, ids, count, target); });
        return read ? DONE : UNREADABLE;
    });
}

int64_t lookup(const Plan& plan, const py::object& table_object, const py::object& tokens, const py::object& starts,
               const py::object& lookback, const py::object& dead, const py::object& lookback_dead, const py::object& out_object) {
    const auto windows = windows_view(plan, tokens, starts, lookback, dead, lookback_dead);
    if (!windows || !is_exact<uint8_t>(table_object) || !is_exact<uint8_t>(out_object, true)) return REFUSED;
    const py::array table = borrowed(table_object);
    py::array out = borrowed(out_object);
    if (table.ndim() != 2 || table.shape(0) < plan.rows_hashed() || out.ndim() != 3) return REFUSED;
    const int64_t row_bytes = table.shape(1);
    if (row_bytes < tk::ROW_BYTES_MIN || row_bytes > tk::ROW_BYTES_MAX) return REFUSED;
    if (out.shape(0) != windows->token_count || out.shape(1) != plan.columns() || out.shape(2) != row_bytes) return REFUSED;
    const auto* const source = static_cast<const std::byte*>(table.data());
    auto* const target = static_cast<std::byte*>(out.mutable_data());
    const auto bytes = static_cast<size_t>(table.size());
    return without_gil(windows->token_count * plan.columns(), [&]() -> int64_t {
        if (!tk::tokens_in_range(plan.view(), *windows)) return UNKNOWN_TOKEN;
        const bool read = tk::guarded(source, bytes, [&] {
            tk::lookup(plan.view(), *windows, 0, windows->token_count, source, row_bytes, target);
        });
        return read ? DONE : UNREADABLE;
    });
}

void dequantise(int values, int scales, int64_t dim, int64_t block, float scale, const Array<uint8_t>& rows, Array<float>& out) {
    require(rows.ndim() >= 1 && dim >= 1 && block >= 1 && dim % block == 0, "rows, dim, block");
    const int64_t row_bytes = rows.shape(rows.ndim() - 1);
    constexpr int64_t VALUE_BITS[] = {16, 16, 32, 8, 8, 4, 4};
    require(0 <= values && values < 7 && 0 <= scales && scales < 5, "values, scales");
    const auto scale_type = static_cast<tk::ScaleType>(scales);
    const int64_t scale_bytes = dim / block * tk::inline_scale_bytes(scale_type);
    require(dim * VALUE_BITS[values] % 8 == 0 && row_bytes == dim * VALUE_BITS[values] / 8 + scale_bytes, "row_bytes");
    const int64_t count = rows.size() / row_bytes;
    require(out.size() == count * dim, "out");
    const tk::RowFormat format{static_cast<tk::ValueType>(values), scale_type, row_bytes, dim, block, scale};
    const auto* const source = reinterpret_cast<const std::byte*>(rows.data());
    float* const target = out.mutable_data();
    const py::gil_scoped_release released;
    tk::dequantise(format, source, count, target);
}

std::optional<uint32_t> crc32c(const Array<uint8_t>& data, uint32_t crc) {
    const auto* const bytes = reinterpret_cast<const std::byte*>(data.data());
    const auto size = static_cast<size_t>(data.size());
    const py::gil_scoped_release released;
    uint32_t after = 0;
    if (!tk::guarded(bytes, size, [&] { after = tk::crc32c(crc, bytes, size); })) return std::nullopt;
    return after;
}

int flush(const Array<uint8_t>& data) {
    const auto* const bytes = reinterpret_cast<const std::byte*>(data.data());
    const auto size = static_cast<size_t>(data.size());
    const py::gil_scoped_release released;
    return static_cast<int>(tk::flush(bytes, size));
}

}  // namespace

PYBIND11_MODULE(_native, module) {
    module.attr("DONE") = DONE;
    module.attr("UNREADABLE") = UNREADABLE;
    module.attr("REFUSED") = REFUSED;
    module.attr("UNKNOWN_TOKEN") = UNKNOWN_TOKEN;
    module.attr("NOTHING_FOUND") = NOTHING_FOUND;
    py::class_<Plan>(module, "Plan")
        .def(py::init<int, const Array<int32_t>&, int, const Array<uint64_t>&, const Array<int64_t>&, const Array<int64_t>&, int64_t,
                      int64_t, std::optional<Array<int32_t>>, int64_t>());
    module.def("row_ids", &row_ids, py::arg("plan"), py::arg("tokens"), py::arg("starts"), py::arg("lookback"), py::arg("dead"),
               py::arg("lookback_dead"), exact("out"));
    module.def("gather_rows", &gather_rows, py::arg("table"), py::arg("rows"), py::arg("out"));
    module.def("lookup", &lookup, py::arg("plan"), py::arg("table"), py::arg("tokens"), py::arg("starts"), py::arg("lookback"),
               py::arg("dead"), py::arg("lookback_dead"), py::arg("out"));
    module.def("dequantise", &dequantise, py::arg("values"), py::arg("scales"), py::arg("dim"), py::arg("block"), py::arg("scale"), exact("rows"),
               exact("out"));
    module.def("crc32c", &crc32c, exact("data"), py::arg("crc"));
    module.def("flush", &flush, exact("data"));
    bind_decode(module);
    bind_dedup(module);
    bind_entry_states(module);
    bind_nearest(module);
    bind_prefetch(module);
}
