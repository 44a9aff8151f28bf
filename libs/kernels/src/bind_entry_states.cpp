// Python's door to what tokens find in a layer's dictionary, and to merging it. One object for a layer checks its arrays once.
#include <algorithm>
#include <cstring>
#include <vector>

#include "../include/treadle/kernels/entry_states.hpp"
#include "../include/treadle/kernels/guard.hpp"
#include "heads.hpp"

namespace py = pybind11;
namespace tk = treadle::kernels;

namespace {

constexpr int64_t HOLD_ROWS = 32;  // of heads: too short to let go of the GIL

class EntryStates {
public:
    EntryStates(const py::object& keys, const py::object& key_scales, const py::object& list_keys, const py::object& list_starts,
                int64_t lists_probed, const py::object& states, const py::object& state_scales, const py::object& log_z,
                const py::object& thresholds, const py::object& heads_of, const py::object& whitening)
        : keys_(given(keys)), key_scales_(given(key_scales)), list_keys_(given(list_keys)), states_(given(states)),
          state_scales_(given(state_scales)), log_z_(given(log_z)), whitening_(given(whitening)) {
        const auto type = key_type(keys);
        require(type && keys_.ndim() == 3 && states_.ndim() == 4 && key_type(states) == type, "keys, states");
        require(is_array(heads_of, 'i', 4) && given(heads_of).ndim() == 3, "heads_of");
        const py::array members = given(heads_of);
        const int64_t books = keys_.shape(0), entries = keys_.shape(1), dim = keys_.shape(2), joined = states_.shape(2), head_dim = states_.shape(3);
        const int64_t lookups = members.shape(1), heads = books * lookups * joined;
        require(books >= 1 && entries >= 1 && entries <= tk::ENTRIES_MAX && dim >= 1 && dim <= tk::KEY_DIM_MAX, "keys");
        require(lookups >= 1 && joined >= 1 && dim == joined * head_dim && has_shape(states_, {books, entries, joined, head_dim}), "states");
        require(has_shape(members, {books, lookups, joined}), "heads_of");
        heads_of_.assign(static_cast<const int32_t*>(members.data()), static_cast<const int32_t*>(members.data()) + heads);
        std::vector<int32_t> every(heads_of_);
        std::sort(every.begin(), every.end());
        for (int64_t head = 0; head < heads; ++head) require(every[static_cast<size_t>(head)] == head, "heads_of");
        const bool scaled = *type == tk::KeyType::int8;
        require(key_scales.is_none() != scaled && state_scales.is_none() != scaled, "key_scales, state_scales");
        require(!scaled || (is_array(key_scales, 'f', 2) && has_shape(key_scales_, {books, entries})), "key_scales");
        require(!scaled || (is_array(state_scales, 'f', 2) && has_shape(state_scales_, {books, entries, joined})), "state_scales");
        require(is_array(log_z, 'f', 4) && has_shape(log_z_, {books, entries, joined}), "log_z");
        require(is_array(thresholds, 'f', 4) && has_shape(given(thresholds), {books}), "thresholds");
        const auto* const limits = static_cast<const float*>(given(thresholds).data());
        thresholds_.assign(limits, limits + books);
        require(whitening.is_none() || (is_array(whitening, 'f', 4) && has_shape(whitening_, {heads, head_dim, head_dim})), "whitening");
        const int64_t lists = copy_lists(list_keys, list_starts, lists_probed);
        const tk::NearestView search{*type, bytes(keys_), scaled ? halves(key_scales_) : nullptr, entries, dim,
                                     lists != 0 ? floats(list_keys_) : nullptr, list_starts_.data(), lists, lists_probed};
        view_ = {search, books, lookups, joined, heads, head_dim, heads_of_.data(), whitening.is_none() ? nullptr : floats(whitening_),
                 bytes(states_), scaled ? halves(state_scales_) : nullptr, floats(log_z_), thresholds_.data()};
    }
    EntryStates(const EntryStates&) = delete;  // the view points into this object
    EntryStates& operator=(const EntryStates&) = delete;

    int64_t find(const py::object& queries, const py::object& rows, const py::object& states_out, const py::object& log_z_out,
                 const py::object& cosines_out, const py::object& outside_out) const {
        const auto heads = heads_of_tokens(queries, view_.heads, view_.head_dim);
        if (!heads) return REFUSED;
        const auto places = places_among(rows, heads->tokens);
        if (!places) return REFUSED;
        const tk::QueriesView asked{heads->numbers, heads->stride, places->begin, places->count};
        if (!is_array(states_out, 'f', 4, true) || !is_array(log_z_out, 'f', 4, true) || !is_array(cosines_out, 'f', 4, true)) return REFUSED;
        if (!is_exact<bool>(outside_out, true)) return REFUSED;
        py::array states = given(states_out), log_z = given(log_z_out), cosines = given(cosines_out), outside = given(outside_out);
        const Shape lookups{asked.count, view_.books, view_.lookups};
        if (!has_shape(states, {asked.count, view_.heads, view_.head_dim}) || !has_shape(log_z, {asked.count, view_.heads})) return REFUSED;
        if (!has_shape(cosines, lookups) || !has_shape(outside, lookups)) return REFUSED;
        const tk::FoundStates found{static_cast<float*>(states.mutable_data()), static_cast<float*>(log_z.mutable_data()),
                                    static_cast<float*>(cosines.mutable_data()), static_cast<bool*>(outside.mutable_data())};
        const tk::MappedBytes mapped[] = {bytes_of(keys_), bytes_of(key_scales_), bytes_of(list_keys_), bytes_of(states_),
                                          bytes_of(state_scales_), bytes_of(log_z_), bytes_of(whitening_)};
        const py::gil_scoped_release released;
        const auto at_once = static_cast<size_t>(std::min(asked.count, tk::tokens_at_once(view_)) * view_.lookups);
        const auto lists = static_cast<size_t>(view_.search.lists);
        std::vector<float> keys(at_once * static_cast<size_t>(view_.search.dim)), dots(at_once);
        std::vector<int32_t> indices(at_once);
        std::vector<uint64_t> wanted(lists), ranked(lists);
        const tk::EntriesWorkspace space{keys.data(), indices.data(), dots.data(), {wanted.data(), ranked.data()}};
        bool all_found = false;
        if (!tk::guarded_all(mapped, std::size(mapped), [&] { all_found = tk::entry_states(view_, asked, space, found); })) return UNREADABLE;
        return all_found ? DONE : NOTHING_FOUND;
    }

private:
    static const std::byte* bytes(const py::array& array) { return static_cast<const std::byte*>(array.data()); }
    static const float* floats(const py::array& array) { return static_cast<const float*>(array.data()); }
    static const uint16_t* halves(const py::array& array) { return static_cast<const uint16_t*>(array.data()); }

    // The starts are copied: a file that is written to later must not move a scan out of its keys. Returns how many lists there are.
    int64_t copy_lists(const py::object& keys, const py::object& starts, int64_t lists_probed) {
        require(keys.is_none() == starts.is_none() && lists_probed >= 1, "list_keys, list_starts, lists_probed");
        if (keys.is_none()) return 0;
        require(is_array(keys, 'f', 4) && is_array(starts, 'i', 4) && list_keys_.ndim() == 3, "list_keys, list_starts");
        const int64_t books = keys_.shape(0), lists = list_keys_.shape(1);
        const py::array source = given(starts);
        require(lists >= 1 && lists <= tk::LISTS_MAX && has_shape(list_keys_, {books, lists, keys_.shape(2)}), "list_keys");
        require(has_shape(source, {books, lists + 1}), "list_starts");
        list_starts_.resize(static_cast<size_t>(source.size()));
        const auto span = bytes_of(source);
        int32_t* const target = list_starts_.data();
        require(tk::guarded(span.begin, span.count, [=] { std::memcpy(target, span.begin, span.count); }), "list_starts: unreadable");
        for (int64_t book = 0; book < books; ++book) require(tk::lists_fit(target + book * (lists + 1), lists, keys_.shape(1)), "list_starts");
        return lists;
    }

    py::array keys_, key_scales_, list_keys_, states_, state_scales_, log_z_, whitening_;  // held: the view points into them
    std::vector<int32_t> heads_of_, list_starts_;
    std::vector<float> thresholds_;
    tk::EntriesView view_;
};

int64_t merge_states(const py::object& a_object, const py::object& log_z_object, const py::object& rows, const py::object& other_object,
                     const py::object& other_log_z_object) {
    if (!is_array(a_object, 'f', 4, true) || !is_array(log_z_object, 'f', 4, true)) return REFUSED;
    if (!is_array(other_object, 'f', 4) || !is_array(other_log_z_object, 'f', 4)) return REFUSED;
    py::array a = given(a_object), log_z = given(log_z_object);
    const py::array other = given(other_object), other_log_z = given(other_log_z_object);
    if (a.ndim() != 3 || !has_shape(log_z, {a.shape(0), a.shape(1)})) return REFUSED;
    const int64_t heads = a.shape(1), dim = a.shape(2);
    const auto places = places_among(rows, a.shape(0));
    if (!places) return REFUSED;
    const int64_t count = places->count;
    if (!has_shape(other, {count, heads, dim}) || !has_shape(other_log_z, {count, heads})) return REFUSED;
    const auto* const theirs = static_cast<const float*>(other.data());
    const auto* const their_log_z = static_cast<const float*>(other_log_z.data());
    auto* const mine = static_cast<float*>(a.mutable_data());
    auto* const my_log_z = static_cast<float*>(log_z.mutable_data());
    const auto merge = [&] { tk::merge_states(heads, dim, places->begin, count, theirs, their_log_z, mine, my_log_z); };
    if (count * heads <= HOLD_ROWS) {
        merge();
    } else {
        const py::gil_scoped_release released;
        merge();
    }
    return DONE;
}

}  // namespace

void bind_entry_states(py::module_& module) {
    py::class_<EntryStates>(module, "EntryStates")
        .def(py::init<const py::object&, const py::object&, const py::object&, const py::object&, int64_t, const py::object&, const py::object&,
                      const py::object&, const py::object&, const py::object&, const py::object&>())
        .def("find", &EntryStates::find, py::arg("queries"), py::arg("rows"), py::arg("states"), py::arg("log_z"), py::arg("cosines"),
             py::arg("outside"));
    module.def("merge_states", &merge_states, py::arg("a"), py::arg("log_z"), py::arg("rows"), py::arg("other"), py::arg("other_log_z"));
}
