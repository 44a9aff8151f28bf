// Python's door to the headers: takes arrays of exact dtype, checks that sizes fit together, drops the GIL. No more.
#include <pybind11/stl.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "../include/treadle/kernels/crc32c.hpp"
#include "../include/treadle/kernels/dequantise.hpp"
#include "../include/treadle/kernels/guard.hpp"
#include "../include/treadle/kernels/lookup.hpp"
#include "arrays.hpp"

namespace py = pybind11;
namespace tk = treadle::kernels;

void bind_dedup(py::module_& module);
void bind_prefetch(py::module_& module);

namespace {

using Mask = std::optional<Array<bool>>;

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

tk::WindowsView windows_view(const Plan& plan, const Array<int64_t>& tokens, const Array<int32_t>& starts,
                             const Array<int64_t>& lookback, const Mask& dead, const Mask& lookback_dead) {
    require(tokens.ndim() == 1 && starts.ndim() == 1 && starts.size() >= 1 && lookback.ndim() == 2, "windows");
    require(lookback.shape(0) == starts.size() - 1 && lookback.shape(1) >= plan.view().order_max - 1, "lookback");
    require(starts.data()[starts.size() - 1] == tokens.size(), "starts");
    require(!dead || dead->size() == tokens.size(), "dead");
    require(!lookback_dead || lookback_dead->size() == lookback.size(), "lookback_dead");
    return {tokens.data(), tokens.size(), starts.data(), lookback.shape(0), lookback.data(), lookback.shape(1),
            dead ? dead->data() : nullptr, lookback_dead ? lookback_dead->data() : nullptr};
}

bool row_ids(const Plan& plan, const Array<int64_t>& tokens, const Array<int32_t>& starts, const Array<int64_t>& lookback,
             const Mask& dead, const Mask& lookback_dead, Array<int64_t>& out) {
    const tk::WindowsView windows = windows_view(plan, tokens, starts, lookback, dead, lookback_dead);
    require(out.size() == tokens.size() * plan.columns(), "out");
    int64_t* const rows = out.mutable_data();
    const py::gil_scoped_release released;
    if (!tk::tokens_in_range(plan.view(), windows)) return false;
    tk::hash_rows(plan.view(), windows, 0, windows.token_count, rows);
    return true;
}

constexpr int64_t DONE = -1, UNREADABLE = -2, REFUSED = -3;
constexpr int64_t HOLD_ROWS = 32;  // one token: too short to let go of the GIL, which a busy Python thread gives back only after 5 ms

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
    const auto table = py::reinterpret_borrow<py::array>(table_object);
    const auto rows = py::reinterpret_borrow<py::array>(rows_object);
    auto out = py::reinterpret_borrow<py::array>(out_object);
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

constexpr int64_t UNKNOWN_TOKEN = 0;

int64_t lookup(const Plan& plan, const Array<uint8_t>& table, const Array<int64_t>& tokens, const Array<int32_t>& starts,
            const Array<int64_t>& lookback, const Mask& dead, const Mask& lookback_dead, Array<uint8_t>& out) {
    const tk::WindowsView windows = windows_view(plan, tokens, starts, lookback, dead, lookback_dead);
    require(table.ndim() == 2 && table.shape(0) >= plan.rows_hashed(), "table");
    require(out.size() == tokens.size() * plan.columns() * table.shape(1), "out");
    const auto* const source = reinterpret_cast<const std::byte*>(table.data());
    auto* const target = reinterpret_cast<std::byte*>(out.mutable_data());
    const int64_t row_bytes = table.shape(1);
    const auto bytes = static_cast<size_t>(table.size());
    return without_gil(windows.token_count * plan.columns(), [&]() -> int64_t {
        if (!tk::tokens_in_range(plan.view(), windows)) return UNKNOWN_TOKEN;
        const bool read = tk::guarded(source, bytes, [&] {
            tk::lookup(plan.view(), windows, 0, windows.token_count, source, row_bytes, target);
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

}  // namespace

PYBIND11_MODULE(_native, module) {
    module.attr("DONE") = DONE;
    module.attr("UNREADABLE") = UNREADABLE;
    module.attr("REFUSED") = REFUSED;
    py::class_<Plan>(module, "Plan")
        .def(py::init<int, const Array<int32_t>&, int, const Array<uint64_t>&, const Array<int64_t>&, const Array<int64_t>&, int64_t,
                      int64_t, std::optional<Array<int32_t>>, int64_t>());
    module.def("row_ids", &row_ids, py::arg("plan"), exact("tokens"), exact("starts"), exact("lookback"), exact("dead"),
               exact("lookback_dead"), exact("out"));
    module.def("gather_rows", &gather_rows, py::arg("table"), py::arg("rows"), py::arg("out"));
    module.def("lookup", &lookup, py::arg("plan"), exact("table"), exact("tokens"), exact("starts"), exact("lookback"), exact("dead"),
               exact("lookback_dead"), exact("out"));
    module.def("dequantise", &dequantise, py::arg("values"), py::arg("scales"), py::arg("dim"), py::arg("block"), py::arg("scale"), exact("rows"),
               exact("out"));
    module.def("crc32c", &crc32c, exact("data"), py::arg("crc"));
    bind_dedup(module);
    bind_prefetch(module);
}
